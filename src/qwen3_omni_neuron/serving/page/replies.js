// What the user may do with a turn: hear it again, save its sound, copy its text.

import { problem } from "./panel.js";
import { Player, RATE } from "./sound.js";

const MOST_SAMPLES = 20 * 60 * RATE; // of all turns, 58 MB; the oldest ones are forgotten first

const kept = []; // recordings, the oldest first
let replaying = null; // recording that is played again

// Sound of one turn, with the buttons to play and save it.
export class Recording {
  // name: of the saved file. onReplay(): called before it is played again.
  constructor(name, onReplay) {
    const pieces = []; // Int16Array
    Object.assign(this, { name, onReplay, pieces, length: 0 });
    this.play = button("Replay", () => (this.player ? this.stop() : this.replay()));
    this.save = button("Download", () => download(this.wav(), this.name));
    this.buttons = [this.play, this.save];
  }

  add(samples) {
    if (!this.length) kept.push(this);
    this.pieces.push(samples);
    this.length += samples.length;
    while (kept.length > 1 && kept.reduce((sum, { length }) => sum + length, 0) > MOST_SAMPLES) {
      kept.shift().forget();
    }
  }

  forget() {
    this.stop();
    Object.assign(this, { pieces: [], length: 0 });
    this.buttons.forEach((one) => one.remove());
  }

  async replay() {
    this.onReplay();
    stopReplay();
    replaying = this;
    const player = new Player(() => this.stop());
    this.player = player;
    this.play.textContent = "Stop replay";
    try {
      await player.open(this.pieces, document.getElementById("loudspeaker").value);
    } catch (error) {
      if (this.player !== player) return; // it was stopped, which may be the cause
      this.stop();
      throw error;
    }
  }

  stop() {
    this.player?.close();
    this.player = null;
    this.play.textContent = "Replay";
    if (replaying === this) replaying = null;
  }

  // A file of 16-bit samples.
  wav() {
    const header = new DataView(new ArrayBuffer(44));
    const bytes = 2 * this.length;
    const letters = (at, text) => [...text].forEach((x, k) => header.setUint8(at + k, x.charCodeAt(0)));
    letters(0, "RIFF");
    header.setUint32(4, 36 + bytes, true);
    letters(8, "WAVEfmt ");
    header.setUint32(16, 16, true); // bytes of the format
    header.setUint16(20, 1, true); // PCM
    header.setUint16(22, 1, true); // channels
    header.setUint32(24, RATE, true);
    header.setUint32(28, 2 * RATE, true); // bytes a second
    header.setUint16(32, 2, true); // bytes of a sample
    header.setUint16(34, 16, true); // bits of it
    letters(36, "data");
    header.setUint32(40, bytes, true);
    return new Blob([header, ...this.pieces], { type: "audio/wav" });
  }
}

export function stopReplay() {
  replaying?.stop();
}

export function forgetRecordings() {
  kept.splice(0).forEach((recording) => recording.forget());
}

// A button that copies a text, or none if the browser has no clipboard.
export function copyButtons(text) {
  if (!navigator.clipboard) return [];
  const made = button("Copy", async () => {
    await navigator.clipboard.writeText(text()).catch(() => {
      throw new Error("The browser did not let the page copy. Select the text and copy it.");
    });
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 2000);
  });
  return [made];
}

// action: may throw an Error with words for the user.
export function button(label, action) {
  const made = Object.assign(document.createElement("button"), { type: "button" });
  made.textContent = label;
  made.addEventListener("click", async () => {
    try {
      await action();
    } catch (error) {
      problem(error.message);
    }
  });
  return made;
}

export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
