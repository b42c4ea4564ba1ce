// Microphone and loudspeaker, each an AudioWorklet with a context of its own: the microphone's runs
// at the device's rate, which Firefox does not convert.

export const RATE = 24000;

export class Microphone {
  // onPiece(samples, peak): gets Int16Array pieces of 20 ms, peak from 0 to 1. onLost(): called when
  // the device is gone.
  constructor(onPiece, onLost) {
    Object.assign(this, { onPiece, onLost });
    this.flushed = () => {};
  }

  // Ask the user for the microphone and open it. Throws an Error with words for the user.
  async open() {
    const sound = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
    const asked = { audio: { ...sound, autoGainControl: true } };
    this.stream = await device("microphone", asked, this.onLost);
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

  // Have what was heard until now handed over.
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

export class Loudspeaker {
  // on: functions by the kind of message of the worklet.
  constructor(on) {
    this.on = { ...on, stopped: (data) => this.stopped(data) };
    this.stopped = () => {};
  }

  async open() {
    this.context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
    this.resume(); // at once: some browsers allow it during the user's click alone
    await this.context.audioWorklet.addModule("page/playback.worklet.js");
    const options = { numberOfInputs: 0, outputChannelCount: [1] };
    this.node = new AudioWorkletNode(this.context, "playback", options);
    this.node.port.onmessage = ({ data }) => this.on[data.kind](data);
    this.node.connect(this.context.destination);
  }

  resume() {
    resume(this.context);
  }

  // base64: of 16-bit samples.
  push(item, base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const samples = Float32Array.from(new Int16Array(bytes.buffer), (value) => value / 32768);
    this.node.port.postMessage({ kind: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.node.port.postMessage({ kind: "end", item });
  }

  // Be silent. Gives the item that played, null where none did, and the ms of it that were heard.
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

// Ask the user for a device. onLost(): called when it is gone. Throws an Error with words for the user.
export async function device(name, asked, onLost) {
  if (!navigator.mediaDevices) {
    throw new Error(`A browser gives the ${name} to pages at localhost or over https only.`);
  }
  try {
    const stream = await navigator.mediaDevices.getUserMedia(asked);
    stream.getTracks().forEach((track) => track.addEventListener("ended", onLost));
    return stream;
  } catch (error) {
    const why = { NotAllowedError: "it was not allowed", NotFoundError: "there is none" };
    throw new Error(`No ${name}: ${why[error.name] ?? error.message}. You can still write.`);
  }
}

// A telephone suspends sound during a call, and browsers until there was a click.
function resume(context) {
  if (context && context.state !== "running") context.resume().catch(() => {}); // closed meanwhile
}

export function base64Of(samples) {
  return btoa(String.fromCharCode(...new Uint8Array(samples.buffer)));
}
