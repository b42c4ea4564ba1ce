// The turns on the page: what each side said, as it comes, and the timeline of each answer.

import { announce } from "./panel.js";
import { button, copyButtons } from "./replies.js";

const list = document.getElementById("turns");
const scroller = document.getElementById("scroller");

class Turn {
  constructor(who, side) {
    this.who = who;
    this.root = element("li", side);
    this.words = element("p", "words");
    this.root.append(element("h3", "", who), this.words);
    this.toEnd();
  }

  toEnd() {
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

  offer(buttons) {
    const row = element("p", "buttons");
    row.append(...buttons);
    if (buttons.length) keepAtEnd(() => this.root.append(row));
  }
}

export class UserTurn extends Turn {
  constructor() {
    super("You", "user");
  }

  // Whether it waits for a session.
  unsent(yes) {
    this.root.classList.toggle("unsent", yes);
    this.toEnd(); // after the notes about the session
  }

  // recording: see replies.js.
  heard(recording) {
    if (recording.length) this.offer(recording.buttons);
  }

  // There is no transcript.
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
  // since: end of the question. id: of the response. recording: see replies.js. renew: begins
  // another conversation, which is offered after a fault, since the next answers may repeat it.
  constructor(id, since, recording, renew) {
    super("Answer", "answer");
    Object.assign(this, { id, since, recording, renew, making: true, dropped: false, over: false });
    this.fault = ""; // why the answer is empty or not complete
    this.gaps = [];
    this.track = element("div", "track");
    this.track.setAttribute("aria-hidden", "true");
    this.figures = element("p", "figures");
    this.times = element("details", "times");
    this.times.append(element("summary", "", "Times"), this.track, this.figures);
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

  // It was played to its end, was stopped, or has no sound.
  finish(interrupted = false) {
    if (this.over) return;
    this.over = true;
    this.end = performance.now();
    this.pending(false);
    this.draw();
    const note = interrupted ? "Interrupted" : this.fault;
    if (note) keepAtEnd(() => this.words.after(element("p", "why", note)));
    const buttons = this.recording.length ? [...this.recording.buttons] : [];
    if (this.text) buttons.push(...copyButtons(() => this.text));
    if (this.fault) buttons.push(button("New conversation", this.renew));
    this.offer(buttons);
    this.onOver?.();
    // A spoken answer is not announced: the microphone would hear it.
    const words = this.firstSound ? [this.fault] : [`${this.who}:`, this.text, note];
    announce(words.filter(Boolean).join(" "));
  }

  // Wait until a complete answer was played; return at once for an incomplete one.
  async played() {
    if (!this.making && !this.over) await new Promise((resolve) => (this.onOver = resolve));
  }

  // Draw the timeline and its figures, in the same colours.
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
    ];
    const spans = figures.filter(Boolean).map(([kind, text]) => element("span", kind, text));
    this.figures.replaceChildren(...spans);
    if (spans.length) keepAtEnd(() => this.root.append(this.times));
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;

// Forget all turns.
export function clearTurns() {
  list.replaceChildren();
}

// Everything that was said, a paragraph a turn.
export function transcript() {
  const paragraph = (turn) => {
    const [who, ...said] = turn.querySelectorAll("h3, .words, img, .why");
    if (!who) return turn.textContent; // a note
    return `${who.textContent}: ${said.map((one) => one.alt ?? one.textContent).join(" ").trim()}`;
  };
  return [...list.children].map(paragraph).join("\n\n") + "\n";
}

export function note(text) {
  keepAtEnd(() => list.append(element("li", "note", text)));
}

// Change the list; keep it scrolled to its end if it was.
function keepAtEnd(change) {
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 120;
  change();
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
}

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}
