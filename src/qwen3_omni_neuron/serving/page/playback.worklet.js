// Jitter buffer of answers for the loudspeaker. Counts the samples played of each answer, and underruns.

const FIRST_S = 0.04; // buffered before an answer begins; or half of the last answer's target
const AGAIN_S = 0.12; // and before it resumes after its first underrun; doubled for each further one
const MOST_S = 0.48;
const FADE_S = 0.005; // at a stop, to avoid a click
const REPORT = 2400; // samples from one report to the next

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.pieces = []; // { item, samples, at }, the next first
    this.depth = 0; // samples in them
    this.target = FIRST_S * sampleRate;
    this.item = null; // of the answer that plays, or is the next to play
    this.played = 0; // samples of it
    this.ended = false; // no more samples will come
    this.waiting = true;
    this.fading = [];
    this.underruns = 0;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => this[data.kind](data);
  }

  push({ item, samples }) {
    if (item !== this.item) this.begin(item);
    this.pieces.push({ samples, at: 0 });
    this.depth += samples.length;
  }

  // An answer replaces the one before.
  begin(item) {
    this.drop();
    const target = Math.max(FIRST_S * sampleRate, this.target / 2);
    Object.assign(this, { item, played: 0, ended: false, waiting: true, target });
  }

  end({ item }) {
    if (item === this.item) this.ended = true;
  }

  stop() {
    const { item, played } = this;
    const fade = new Float32Array(Math.min(this.waiting ? 0 : this.depth, FADE_S * sampleRate));
    this.take(fade);
    this.fading = fade.map((sample, k) => sample * (1 - (k + 1) / fade.length));
    this.drop();
    this.item = null;
    this.port.postMessage({ kind: "stopped", item, played });
    this.report();
  }

  drop() {
    this.pieces = [];
    this.depth = 0;
  }

  process(_, outputs) {
    const [out] = outputs[0];
    const fade = this.fading.slice(0, out.length);
    out.set(fade);
    this.fading = this.fading.slice(fade.length);
    if (this.item !== null) this.play(out);
    this.sinceReport += out.length;
    if (this.sinceReport >= REPORT) this.report();
    return true;
  }

  play(out) {
    if (this.waiting && (this.depth >= this.target || (this.ended && this.depth))) {
      this.waiting = false;
      if (!this.played) this.port.postMessage({ kind: "started", item: this.item });
    }
    if (!this.waiting) this.played += this.take(out);
    if (this.depth) return;
    if (this.ended) {
      this.port.postMessage({ kind: "finished", item: this.item, played: this.played });
      this.item = null;
    } else if (!this.waiting) {
      this.waiting = true;
      this.underruns += 1;
      this.target = Math.min(MOST_S * sampleRate, Math.max(AGAIN_S * sampleRate, 2 * this.target));
      this.port.postMessage({ kind: "underrun", item: this.item });
    }
  }

  // Move samples into a block. Returns how many there were.
  take(block) {
    let filled = 0;
    while (filled < block.length && this.pieces.length) {
      const piece = this.pieces[0];
      const part = piece.samples.subarray(piece.at, piece.at + block.length - filled);
      block.set(part, filled);
      filled += part.length;
      piece.at += part.length;
      if (piece.at === piece.samples.length) this.pieces.shift();
    }
    this.depth -= filled;
    return filled;
  }

  report() {
    this.sinceReport = 0;
    const { depth, underruns } = this;
    this.port.postMessage({ kind: "report", depth, underruns });
  }
}

registerProcessor("playback", Playback);
