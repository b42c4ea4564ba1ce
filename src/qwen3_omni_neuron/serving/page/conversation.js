// The turns on the page: what each side said, as it comes, and the timeline of each answer.

const list = document.getElementById("turns");
const scroller = document.getElementById("scroller");
const announcement = document.getElementById("announcement");

class Turn {
  constructor(who, side) {
    this.who = who;
    this.root = element("li", side);
    this.words = element("p", "words");
    this.root.append(element("h3", "", who), this.words);
    document.getElementById("empty").hidden = true;
    keepAtEnd(() => list.append(this.root));
  }

  get text() {
    return this.words.textContent;
  }

  add(text) {
    this.pending(false);
    keepAtEnd(() => this.words.append(text));
  }

  write(text) {
    this.pending(false);
    keepAtEnd(() => (this.words.textContent = text));
  }

  pending(yes) {
    this.root.classList.toggle("pending", yes);
  }

}

export class UserTurn extends Turn {
  constructor() {
    super("You", "user");
  }

  show(image) {
    this.pending(false);
    image.addEventListener("load", () => keepAtEnd(() => {}));
    keepAtEnd(() => this.words.replaceWith(image));
  }
}

// Times are performance.now()'s, in ms.
export class Answer extends Turn {
  // since: end of the question. id: of the response.
  constructor(id, since) {
    super("Answer", "answer");
    Object.assign(this, { id, since, making: true, dropped: false, over: false });
    this.underruns = [];
    this.track = element("div", "track");
    this.track.setAttribute("aria-hidden", "true");
    this.figures = element("p", "figures");
    this.pending(true);
  }

  add(text) {
    this.firstText ??= performance.now();
    super.add(text);
  }

  started() {
    this.firstSound = performance.now();
    this.draw();
  }

  underrun() {
    this.underruns.push(performance.now());
    this.draw();
  }

  // The last of it was played, or it was stopped, or it has no sound.
  finish(note = "") {
    if (this.over) return;
    this.over = true;
    this.note = note;
    this.end = performance.now();
    this.pending(false);
    this.root.classList.toggle("cut", note !== "");
    this.draw();
    this.onOver?.();
    // One that was heard is not read out, too: that would be heard by the microphone.
    if (this.text && !this.firstSound) announce(`${this.who}: ${this.text}`);
  }

  // Wait until what came of it was played; not where more of it was to come.
  async played() {
    if (!this.making && !this.over) await new Promise((resolve) => (this.onOver = resolve));
  }

  draw() {
    const end = this.end ?? performance.now();
    const place = (time) => `${(100 * (time - this.since)) / Math.max(1, end - this.since)}%`;
    const mark = (kind, time) => {
      const made = element("i", kind);
      made.style.left = place(time);
      return made;
    };
    const marks = this.underruns.map((time) => mark("underrun", time));
    if (this.firstText) marks.push(mark("text", this.firstText));
    if (this.firstSound) marks.unshift(mark("sound", this.firstSound));
    this.track.replaceChildren(...marks);
    const after = (time) => `${Math.round(time - this.since)} ms`;
    const count = this.underruns.length;
    const parts = [
      this.firstText && `first text ${after(this.firstText)}`,
      this.firstSound && `first sound ${after(this.firstSound)}`,
      this.firstSound && this.end && `${((this.end - this.firstSound) / 1000).toFixed(1)} s played`,
      this.firstSound && (count === 1 ? "1 underrun" : `${count} underruns`),
      this.note,
    ];
    const spans = parts.filter(Boolean).map((part) => element("span", "", part));
    this.figures.replaceChildren(...spans.flatMap((span, k) => (k ? [" · ", span] : [span])));
    keepAtEnd(() => this.root.append(this.track, this.figures));
  }
}

// Have screen readers read something out.
export function announce(text) {
  announcement.textContent = text;
}

export function note(text) {
  keepAtEnd(() => list.append(element("li", "note", text)));
}

// Change the list, and stay at its end where its reader is there.
function keepAtEnd(change) {
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  change();
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
}

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}
