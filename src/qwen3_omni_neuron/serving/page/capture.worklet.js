// Microphone to 16-bit samples at 24 kHz, in pieces of 20 ms, each with its peak.

const RATE = 24000;
const PIECE = 480;
const REACH = 16; // input samples on either side of an output sample, at the lower of both rates
const PHASES = 64; // of the filter's table, between two input samples

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.step = sampleRate / RATE; // input samples from one output sample to the next
    const stretch = Math.max(1, this.step);
    this.reach = Math.ceil(REACH * stretch);
    this.table = filter(this.reach, stretch);
    this.input = new Float32Array(2 * this.reach);
    this.at = 2 * this.reach; // input sample of the next output sample
    this.piece = new Int16Array(PIECE);
    this.length = 0;
    this.peak = 0;
    this.port.onmessage = () => this.send(true); // flush the unfinished piece
  }

  process(inputs) {
    const channels = inputs[0];
    if (!channels.length) return true;
    const fresh = channels[0];
    const input = new Float32Array(this.input.length + fresh.length);
    input.set(this.input);
    input.set(fresh, this.input.length);
    for (; this.at + this.reach < input.length; this.at += this.step) this.add(input);
    const drop = Math.max(0, Math.floor(this.at) - this.reach);
    this.input = input.slice(drop);
    this.at -= drop;
    return true;
  }

  // Low-pass filter and interpolate: a windowed sinc around the output sample's place.
  add(input) {
    const whole = Math.floor(this.at);
    const phase = Math.round((this.at - whole) * PHASES);
    const table = this.table[phase];
    let sum = 0;
    for (let k = 0; k < table.length; k++) sum += table[k] * input[whole - this.reach + 1 + k];
    this.peak = Math.max(this.peak, Math.abs(sum));
    this.piece[this.length++] = Math.round(Math.max(-1, Math.min(1, sum)) * 32767);
    if (this.length === PIECE) this.send(false);
  }

  send(asked) {
    const samples = this.piece.slice(0, this.length);
    this.port.postMessage({ samples, peak: this.peak, asked }, [samples.buffer]);
    this.length = this.peak = 0;
  }
}

// Weights of the input samples around each phase; they add up to 1.
function filter(reach, stretch) {
  return Array.from({ length: PHASES + 1 }, (_, phase) => {
    const weights = Float32Array.from({ length: 2 * reach }, (_, k) => {
      const x = k - reach + 1 - phase / PHASES;
      const angle = (Math.PI * x * 0.95) / stretch;
      const window = Math.cos((Math.PI * x) / (2 * reach + 2)) ** 2;
      return (angle ? Math.sin(angle) / angle : 1) * window;
    });
    const total = weights.reduce((a, b) => a + b);
    return weights.map((weight) => weight / total);
  });
}

registerProcessor("capture", Capture);
