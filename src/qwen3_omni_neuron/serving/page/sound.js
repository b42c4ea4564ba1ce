// Microphone and loudspeaker, each an AudioWorklet with a context of its own: the microphone's runs
// at the device's rate, which Firefox does not convert.

import { device } from "./devices.js";

export const RATE = 24000;
const MOST_PIECES = 250; // of 20 ms, while nobody speaks
const PART = 8192; // bytes that one call takes as arguments

export class Microphone {
  // onPiece(samples, peak): gets Int16Array pieces of 20 ms, peak from 0 to 1. onLost(): called when
  // the device is gone.
  constructor(onPiece, onLost) {
    Object.assign(this, { onPiece, onLost });
    this.flushed = () => {};
  }

  // Ask the user for the microphone and open it. id: of the chosen one, empty for the default.
  // Throws an Error with words for the user.
  async open(id) {
    const sound = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
    const audio = { ...sound, autoGainControl: true, ...(id && { deviceId: { exact: id } }) };
    this.stream = await device("microphone", { audio }, this.onLost);
    this.context = new AudioContext({ latencyHint: "interactive" });
    await this.context.audioWorklet.addModule("page/capture.worklet.js");
    const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    this.node = new AudioWorkletNode(this.context, "capture", options);
    this.node.port.onmessage = ({ data }) => {
      if (data.samples.length) this.onPiece(data.samples, data.peak);
      if (data.asked) this.flushed();
    };
    this.context.createMediaStreamSource(this.stream).connect(this.node);
    this.resume();
  }

  resume() {
    resume(this.context);
  }

  // Wait until all sound so far was passed to onPiece.
  flush() {
    return new Promise((resolve) => {
      this.flushed = resolve;
      this.node.port.postMessage(null);
    });
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.context?.close();
  }
}

// The latest sound of the microphone in a session, from which turns are cut.
export class Sent {
  constructor() {
    Object.assign(this, { pieces: [], end: 0 }); // end: samples sent so far
  }

  // speaking: a turn may have begun at the first piece.
  add(samples, speaking) {
    this.pieces.push(samples);
    this.end += samples.length;
    while (!speaking && this.pieces.length > MOST_PIECES) this.pieces.shift();
  }

  // Pieces from one sample of the session to another.
  between(from, to) {
    let at = this.end - total(this.pieces);
    return this.pieces.map((piece) => {
      const part = piece.subarray(Math.max(0, from - at), Math.max(0, to - at));
      at += piece.length;
      return part;
    });
  }
}

// Decode a sound file to an Int16Array. Throws if the browser can't.
export async function readSound(file) {
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
  const mixed = new OfflineAudioContext(1, decoded.length, RATE);
  const source = new AudioBufferSourceNode(mixed, { buffer: decoded });
  source.connect(mixed.destination);
  source.start();
  const samples = (await mixed.startRendering()).getChannelData(0);
  return Int16Array.from(samples, (x) => Math.round(Math.max(-1, Math.min(1, x)) * 32767));
}

export class Loudspeaker {
  // on: functions by the kind of message of the worklet.
  constructor(on) {
    this.on = { ...on, stopped: (data) => this.stopped(data) };
    this.stopped = () => {};
  }

  // id: of the chosen device, empty for the default.
  async open(id) {
    this.context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
    this.resume(); // at once: some browsers allow it during the user's click alone
    if (id) await this.choose(id);
    await this.context.audioWorklet.addModule("page/playback.worklet.js");
    const options = { numberOfInputs: 0, outputChannelCount: [1] };
    this.node = new AudioWorkletNode(this.context, "playback", options);
    this.node.port.onmessage = ({ data }) => this.on[data.kind](data);
    this.node.connect(this.context.destination);
  }

  resume() {
    resume(this.context);
  }

  // Play through another device. Throws an Error with words for the user.
  async choose(id) {
    await chooseSink(this.context, id);
  }

  push(item, pcm) {
    const samples = floats(pcm);
    this.node.port.postMessage({ kind: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.node.port.postMessage({ kind: "end", item });
  }

  // Stop playing. Returns the item that played, or null, and how many ms of it were heard.
  async stop() {
    const stopped = new Promise((resolve) => (this.stopped = resolve));
    this.node.port.postMessage({ kind: "stop" });
    const { item, played } = await stopped;
    const onTheWay = this.context.outputLatency || this.context.baseLatency || 0;
    const heard = Math.max(0, played / RATE - onTheWay);
    return { item, ms: Math.floor(heard * 1000) };
  }

  close() {
    this.context?.close();
  }
}

// Plays a recording once.
export class Player {
  // onEnd(): called when all of it was played.
  constructor(onEnd) {
    this.onEnd = onEnd;
  }

  // pieces: Int16Array, at least one. id: of the chosen device, empty for the default.
  async open(pieces, id) {
    this.context = new AudioContext({ sampleRate: RATE });
    const buffer = this.context.createBuffer(1, total(pieces), RATE);
    let at = 0;
    for (const piece of pieces) {
      buffer.copyToChannel(floats(piece), 0, at);
      at += piece.length;
    }
    const source = new AudioBufferSourceNode(this.context, { buffer });
    source.connect(this.context.destination);
    source.addEventListener("ended", () => this.onEnd());
    source.start();
    if (id) await chooseSink(this.context, id);
  }

  close() {
    this.context.close();
  }
}

async function chooseSink(context, id) {
  await context.setSinkId(id).catch(() => {
    throw new Error("The chosen loudspeaker can't be used. Choose another one.");
  });
}

// Phones suspend sound during a call, and browsers until the first click.
function resume(context) {
  if (context && context.state !== "running") context.resume().catch(() => {}); // closed meanwhile
}

const total = (pieces) => pieces.reduce((sum, { length }) => sum + length, 0);

function floats(pcm) {
  return Float32Array.from(pcm, (value) => value / 32768);
}

export function samplesOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Int16Array(bytes.buffer);
}

export function base64Of(samples) {
  const bytes = new Uint8Array(samples.buffer);
  let letters = "";
  for (let at = 0; at < bytes.length; at += PART) {
    letters += String.fromCharCode(...bytes.subarray(at, at + PART));
  }
  return btoa(letters);
}
