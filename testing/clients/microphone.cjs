"use strict";
// Microphone of a client in Node, as microphone.py has it, and the turns of its dialogue.

const { readFileSync } = require("node:fs");
const { join } = require("node:path");

const RATE = 24000;
const PIECE_MS = 20;
const PIECE_BYTES = (2 * RATE * PIECE_MS) / 1000;
const HEADER_BYTES = 44; // of a WAV file as Python's wave writes it

class Microphone {
  // folder: clips, as NAME.wav. send: sends one piece, a Buffer.
  constructor(folder, send) {
    this.folder = folder;
    this.send = send;
    this.left = Buffer.alloc(0);
  }

  // Speak a clip from now on.
  say(name) {
    this.left = readFileSync(join(this.folder, `${name}.wav`)).subarray(HEADER_BYTES);
  }

  // Send a piece every PIECE_MS, until the process ends.
  run() {
    let atMs = performance.now();
    const next = () => {
      const piece = Buffer.alloc(PIECE_BYTES);
      this.left.copy(piece, 0, 0, PIECE_BYTES);
      this.left = this.left.subarray(PIECE_BYTES);
      this.send(piece);
      atMs += PIECE_MS;
      setTimeout(next, Math.max(0, atMs - performance.now()));
    };
    next();
  }
}

// Turns of the dialogue, from what a client hears: the sound of each answer, by its item.
class Dialogue {
  constructor(microphone) {
    this.microphone = microphone;
    this.answers = new Map(); // text by item
    this.sound = new Map(); // bytes by item
    this.calls = [];
    this.interrupted = []; // items
  }

  // Sound of an answer. The second one is interrupted as soon as it is heard.
  heard(item, bytes) {
    if (this.sound.size === 1 && !this.sound.has(item)) this.microphone.say("sum");
    this.sound.set(item, (this.sound.get(item) ?? 0) + bytes);
  }

  // The interruption of an answer, which may be told twice, or only by its end.
  cut(item) {
    if (!this.interrupted.includes(item)) this.interrupted.push(item);
  }

  // The end of an answer. The next question comes when the first one was played.
  ended(item, text) {
    this.answers.set(item, text);
    if (this.answers.size === 1) {
      const playedMs = (this.sound.get(item) / 2 / RATE) * 1000;
      setTimeout(() => this.microphone.say("long"), playedMs);
    }
    if (this.answers.size === 3) this.write();
  }

  // Write the result as JSON, and end the process.
  write() {
    const items = [...this.sound.keys()];
    const result = {
      answers: [...this.answers.values()],
      calls: this.calls,
      interrupted: this.interrupted.map((item) => items.indexOf(item)),
      seconds: [...this.sound.values()].map((bytes) => bytes / 2 / RATE),
    };
    process.stdout.write(JSON.stringify(result), () => process.exit(0));
  }
}

function fail(error) {
  console.error(error);
  process.exit(1);
}

module.exports = { Dialogue, Microphone, fail };
