// The turns on the page: what each side said, as it comes, and the timeline of each answer.

import { announce } from "./panel.js";
import { copyButtons } from "./replies.js";

const list = document.getElementById("turns");
const scroller = document.getElementById("scroller");

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

  // Its words are not known, and won't be.
  unwritten() {
    if (!this.text) this.write("(spoken)");
  }

  show(image) {
    this.pending(false);
    image.addEventListener("load", () => keepAtEnd(() => {}));
    keepAtEnd(() => this.words.replaceWith(image));
  }
}

// Times are performance.now()'s, in ms.
export class Answer extends Turn {
  // since: end of the question. id: of the response. recording: see replies.js.
  constructor(id, since, recording) {
    super("Answer", "answer");
    Object.assign(this, { id, since, recording, making: true, dropped: false, over: false });
    this.gaps = [];
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

  gap() {
    this.gaps.push(performance.now());
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
    this.offer();
    this.onOver?.();
    // One that was heard is not read out, too: that would be heard by the microphone.
    if (this.text && !this.firstSound) announce(`${this.who}: ${this.text}`);
  }

  // Wait until what came of it was played; not where more of it was to come.
  async played() {
    if (!this.making && !this.over) await new Promise((resolve) => (this.onOver = resolve));
  }

  // Its timeline, and beside each figure the colour that stands for it there.
  draw() {
    const end = this.end ?? performance.now();
    const place = (time) => `${(100 * (time - this.since)) / Math.max(1, end - this.since)}%`;
    const mark = (kind, time) => {
      const made = element("i", kind);
      made.style.left = place(time);
      return made;
    };
    const marks = this.gaps.map((time) => mark("gap", time));
    if (this.firstText) marks.push(mark("text", this.firstText));
    if (this.firstSound) marks.unshift(mark("sound", this.firstSound));
    this.track.replaceChildren(...marks);
    const after = (time) => `${Math.round(time - this.since)} ms`;
    const gaps = this.gaps.length;
    const figures = [
      this.firstText && ["text", `first text ${after(this.firstText)}`],
      this.firstSound && ["waiting", `first sound ${after(this.firstSound)}`],
      this.firstSound && this.end && ["sound", `${seconds(this.end - this.firstSound)} played`],
      gaps && ["gap", gaps === 1 ? "1 gap in the sound" : `${gaps} gaps in the sound`],
      this.note && ["", this.note],
    ];
    const spans = figures.filter(Boolean).map(([kind, text]) => element("span", kind, text));
    this.figures.replaceChildren(...spans);
    keepAtEnd(() => this.root.append(this.track, this.figures));
  }

  // What the user may do with it now.
  offer() {
    const sound = this.recording.length ? this.recording.buttons : [];
    const buttons = element("p", "buttons");
    buttons.append(...sound, ...(this.text ? copyButtons(() => this.text) : []));
    if (buttons.childElementCount) keepAtEnd(() => this.root.append(buttons));
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;

// Forget all turns.
export function clearTurns() {
  list.replaceChildren();
  document.getElementById("empty").hidden = false;
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
