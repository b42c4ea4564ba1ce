// The page: what its controls do, and what it does with each event of the server.

import { Answer, UserTurn, note } from "./conversation.js";
import { Realtime, voices } from "./realtime.js";
import { base64Of, Loudspeaker, Microphone, RATE } from "./sound.js";

const SILENCE_MS = 500; // after which the server takes a turn as ended
const SHORTEST_MS = 200; // of a turn that is worth sending
const MOST_PIXELS = 1280; // of a side of an image that is sent

const at = (id) => document.getElementById(id);
const talk = at("talk");

let realtime = null; // these three are null while there is no session
let microphone = null;
let loudspeaker = null;
let starting = null; // promise of a session that begins
let model = null; // name that the server has for it, null while there is no session
let detection = null; // how the server finds turns, null where it can't
let key = "";
let muted = false;
let held = null; // samples sent while the button is held, null where it is not
let interrupting = null; // promise of the last answer's end
let answer = null; // the last one
let endOfQuestion = 0; // time by performance.now()
const turns = new Map(); // the user's turns by the ids of their items
let hearing = null; // the turn that the user speaks

const handsFree = () => document.querySelector("[name=mode]:checked").value === "hands-free";

// The session.

// Begin a session, once. withMicrophone: false where the user writes.
async function start(withMicrophone) {
  if (starting) return starting;
  problem("");
  status("Connecting");
  starting = connect();
  try {
    await starting;
  } catch (error) {
    end();
    problem(error.message);
    throw error;
  }
  if (withMicrophone) await listen();
  show();
  return starting;
}

async function connect() {
  loudspeaker = new Loudspeaker(heardFrom);
  await loudspeaker.open();
  await loadVoices();
  realtime = new Realtime(handlers);
  await realtime.open(key, (reason) => {
    if (!realtime) return; // ended here
    end();
    problem(`The connection ended${reason ? `: ${reason}` : ""}. Press Start for a new session.`);
  });
  configure();
}

async function listen() {
  microphone = new Microphone(hear);
  try {
    await microphone.open();
  } catch (error) {
    microphone = null;
    problem(error.message);
  }
}

function end() {
  const parts = [microphone, loudspeaker, realtime];
  if (model) note("The session ended. The next one begins anew.");
  answer?.finish("interrupted");
  hearing?.root.remove();
  microphone = loudspeaker = realtime = starting = held = hearing = answer = model = null;
  muted = false;
  parts.forEach((part) => part?.close());
  level(0);
  show();
  status("Not connected");
}

function configure() {
  const input = { turn_detection: handsFree() ? detection : null, transcription: { model } };
  const voice = at("voice").value;
  const audio = { input, output: voice ? { voice } : {} };
  realtime?.send("session.update", { session: { type: "realtime", audio } });
}

async function loadVoices() {
  const found = await voices(key);
  at("key-form").hidden = found !== null;
  if (found === null) {
    at("key").focus();
    throw new Error(key ? "The server does not know this key." : "This server asks for an API key.");
  }
  const chosen = at("voice").value;
  at("voice").replaceChildren(...found.map((name) => new Option(name, name)));
  if (found.includes(chosen)) at("voice").value = chosen;
}

// The user's side.

function hear(samples, peak) {
  level(muted ? 0 : peak);
  if (!realtime) return;
  if (handsFree()) {
    if (muted) samples.fill(0); // silence ends a turn, a gap would not
  } else if (held === null) {
    return;
  } else {
    held += samples.length;
  }
  realtime.send("input_audio_buffer.append", { audio: base64Of(samples) });
}

function press() {
  if (held !== null || !microphone) return;
  held = 0;
  realtime.send("input_audio_buffer.clear");
  interrupt();
  show();
}

async function release() {
  if (held === null) return;
  endOfQuestion = performance.now();
  await microphone.flush();
  const long = held >= (SHORTEST_MS * RATE) / 1000;
  held = null;
  show();
  if (!long) {
    status("Hold the button while you speak");
    return;
  }
  await interrupting;
  realtime.send("input_audio_buffer.commit");
  realtime.send("response.create");
}

// End the answer that is made or plays, and tell the server what was heard of it.
function interrupt({ byServer = false } = {}) {
  if (!answer || answer.over) return;
  answer.dropped = true;
  if (answer.making && !byServer) realtime.send("response.cancel");
  interrupting = silence(answer);
}

async function silence(stopped) {
  const { item, ms } = await loudspeaker.stop();
  stopped.finish("interrupted");
  if (item !== null) {
    const heard = { item_id: item, content_index: 0, audio_end_ms: ms };
    realtime?.send("conversation.item.truncate", heard);
  }
}

async function say(content, turn) {
  await start(false);
  interrupt();
  await interrupting;
  const item = { type: "message", role: "user", content: [content] };
  realtime.send("conversation.item.create", { item });
  turn();
}

async function sendText(event) {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  await say({ type: "input_text", text }, () => new UserTurn().write(text));
  endOfQuestion = performance.now();
  realtime.send("response.create");
}

async function sendImage() {
  const [file] = at("image").files;
  at("image").value = "";
  if (!file) return;
  let image_url;
  try {
    image_url = await smaller(file);
  } catch {
    problem(`${file.name} is no image that this browser can read.`);
    return;
  }
  const image = Object.assign(new Image(), { src: image_url, alt: `Image ${file.name}` });
  await say({ type: "input_image", image_url }, () => new UserTurn().show(image));
  status("Now ask about the image");
}

// Read an image into a data URL, no larger than a model makes use of.
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

// The server's side.

const transcription = "conversation.item.input_audio_transcription";
const handlers = {
  "session.created": ({ session }) => {
    model = session.model;
    detection = session.audio.input.turn_detection;
    at("model").textContent = model;
    if (!detection) {
      document.querySelector("[value=hands-free]").disabled = true;
      document.querySelector("[value=push]").checked = true;
    }
  },
  "input_audio_buffer.speech_started": ({ item_id }) => {
    interrupt({ byServer: true });
    hearing = userTurn(item_id);
    status("Hearing you");
  },
  "input_audio_buffer.speech_stopped": () => {
    endOfQuestion = performance.now() - SILENCE_MS;
    hearing = null;
  },
  "input_audio_buffer.committed": ({ item_id }) => {
    hearing = null;
    userTurn(item_id);
  },
  [`${transcription}.delta`]: ({ item_id, delta }) => userTurn(item_id).add(delta),
  [`${transcription}.completed`]: ({ item_id, transcript }) => {
    userTurn(item_id).write(transcript || "(nothing that could be written down)");
    userTurn(item_id).announce();
  },
  [`${transcription}.failed`]: ({ item_id }) => userTurn(item_id).write("(not written down)"),
  "response.created": ({ response }) => {
    answer = new Answer(response.id, endOfQuestion);
    status("Thinking");
    show();
  },
  "response.output_audio_transcript.delta": ({ delta }) => answer.add(delta),
  "response.output_text.delta": ({ delta }) => answer.add(delta),
  "response.output_audio.delta": ({ response_id, item_id, delta }) => {
    answer.item = item_id;
    if (response_id === answer.id && !answer.dropped) loudspeaker.push(item_id, delta);
  },
  "response.output_audio.done": ({ item_id }) => loudspeaker.end(item_id),
  "response.done": ({ response }) => {
    answer.making = false;
    const failed = response.status === "failed";
    if (failed) problem(response.status_details.error.message);
    if (!answer.item || failed) answer.finish(failed ? "failed" : "");
    show();
  },
  error: ({ error }) => {
    // The answer was complete when it was to be cancelled.
    if (error.code !== "response_cancel_not_active") problem(error.message);
  },
};

const answerOf = (item) => (item === answer?.item ? answer : null);
const heardFrom = {
  started: ({ item }) => {
    answerOf(item)?.started();
    status("Speaking");
    show();
  },
  underrun: ({ item }) => answerOf(item)?.underrun(),
  finished: ({ item }) => {
    answerOf(item)?.finish();
    show();
  },
  report: ({ depth, underruns }) => {
    at("depth").textContent = `${Math.round((depth * 1000) / RATE)} ms`;
    at("underruns").textContent = underruns;
    if (answer?.firstSound && !answer.over) answer.draw();
  },
};

function userTurn(item) {
  if (!turns.has(item)) {
    const turn = new UserTurn();
    turn.pending(true);
    turns.set(item, turn);
  }
  return turns.get(item);
}

// What the page shows of it.

function status(text) {
  if (at("status").textContent !== text) at("status").textContent = text;
}

function problem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

function level(peak) {
  // From -60 dB to full scale.
  const share = Math.max(0, Math.min(1, 1 + Math.log10(peak + 1e-6) / 3));
  document.documentElement.style.setProperty("--level", share.toFixed(3));
  at("level").setAttribute("aria-valuenow", Math.round(100 * share));
}

function show() {
  const [does, says] = doing();
  const playing = Boolean(answer && !answer.over);
  at("talk-label").textContent = does;
  talk.classList.toggle("live", says === "Listening" || held !== null);
  talk.classList.toggle("off", muted);
  at("stop").disabled = !playing;
  at("end").disabled = !realtime;
  if (realtime && !playing && !hearing) status(says);
}

// What the button does, and what happens now.
function doing() {
  if (!microphone) return ["Start", "Connected"];
  if (handsFree()) return muted ? ["Unmute", "Muted"] : ["Mute", "Listening"];
  return held === null ? ["Hold to talk", "Hold the button and speak"] : ["Release to send", "Hearing you"];
}

// Controls.

async function begin() {
  if (!starting) return start(true);
  await starting;
  await listen();
  show();
}

const quietly = (action) => (event) => Promise.resolve(action(event)).catch(() => {}); // told already

talk.addEventListener("pointerdown", (event) => {
  if (handsFree() || !microphone || event.button) return;
  talk.setPointerCapture(event.pointerId);
  press();
});
for (const kind of ["pointerup", "pointercancel", "blur"]) talk.addEventListener(kind, release);
talk.addEventListener("keydown", (event) => {
  if ((event.key !== " " && event.key !== "Enter") || handsFree() || !microphone) return;
  event.preventDefault();
  if (!event.repeat) press();
});
talk.addEventListener("keyup", (event) => {
  if (event.key === " " && microphone && !handsFree()) event.preventDefault();
  if (event.key === " " || event.key === "Enter") release();
});
talk.addEventListener("click", quietly((event) => {
  if (!microphone) return begin();
  if (handsFree()) {
    muted = !muted;
    show();
  } else if (event.detail === 0) {
    // A screen reader's click: it can't hold the button, so one begins and the next one ends.
    return held === null ? press() : release();
  }
}));
at("stop").addEventListener("click", () => {
  interrupt();
  interrupting?.then(show);
});
at("end").addEventListener("click", end);
at("composer").addEventListener("submit", quietly(sendText));
at("image").addEventListener("change", quietly(sendImage));
at("mode").addEventListener("change", () => {
  held = null;
  muted = false;
  configure();
  show();
});
at("voice").addEventListener("change", configure);
at("key-form").addEventListener("submit", quietly(async (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  problem("");
  try {
    await loadVoices();
    status("Ready");
  } catch (error) {
    problem(error.message);
  }
}));

at("settings").open = matchMedia("(min-width: 56rem)").matches;
loadVoices().catch((error) => problem(error.message));
