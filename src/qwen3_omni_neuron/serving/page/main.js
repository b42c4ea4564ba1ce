// The page: what its controls do, and what it does with each event of the server.

import { Answer, clearTurns, note, transcript, UserTurn } from "./conversation.js";
import { Camera, listDevices, readImage } from "./devices.js";
import {
  allowHandsFree,
  announce,
  handsFree,
  level,
  offerVoices,
  problem,
  sessionSettings,
  status,
  write,
} from "./panel.js";
import { download, forgetRecordings, Recording, stopReplay } from "./replies.js";
import { describedModel, Realtime, sleep, voices } from "./server.js";
import { base64Of, Loudspeaker, Microphone, RATE, readSound, samplesOf, Sent } from "./sound.js";

const SHORTEST_MS = 200; // of a turn that is worth sending
const MOST_FILE_S = 300; // of a sound file: the server takes 15 MiB in one event
const RESPOND = "respond"; // id of the event that asks for an answer
const DELAYS_S = [0.5, 1, 2, 4, 8, 15, 30]; // before each try to open a lost connection again

const ENDS = {
  session_expired: "The session has reached its time limit.",
};

const at = (id) => document.getElementById(id);
const talk = at("talk");

let realtime = null; // null without a session, like the next five
let microphone = null;
let opening = null; // microphone that the user has not allowed yet
let loudspeaker = null;
let camera = null; // null while it is off, too
let starting = null; // promise of a session that begins or reconnects
let model = null; // the server's description of its model, null before it is known
let detection = null; // settings of the server's turn detection, null if it has none
let key = "";
let muted = false;
let held = null; // samples sent while the button is pressed, null while it is not
let asked = false; // whether an answer is requested that has not begun
let unwanted = false; // whether it was interrupted as well
let interrupting = null; // promise of the last answer's end
let answer = null; // the last one
let answers = 0; // since the conversation began
let endOfQuestion = 0; // time by performance.now()
let sent = new Sent(); // sound of the microphone in this session
let spoken = []; // pieces of the turn that has just ended
let begun = 0; // the turn's first sample, counted from the session's
const turns = new Map(); // the user's turns by the ids of their items
let hearing = null; // the turn that the user speaks

// The session.

// Begin a session, once. withMicrophone: false where the user writes.
async function start(withMicrophone) {
  if (realtime?.ready !== false) problem("");
  if (!starting) {
    status("Connecting");
    starting = connect();
  }
  const mine = starting;
  try {
    await mine;
  } catch (error) {
    if (mine === starting) {
      end();
      problem(error.message);
    }
    throw error;
  }
  if (withMicrophone) await listen();
  show();
}

async function connect() {
  loudspeaker = new Loudspeaker(heardFrom);
  const session = new Realtime(handlers, (reason, ended) => lost(session, reason, ended));
  realtime = session;
  show();
  const sound = loudspeaker.open(at("loudspeaker").value);
  sound.catch(() => {}); // if the server is gone, the user is told that
  await attach(session, sound);
}

// Open a session's connection, for the first time or again. sound: awaited first.
async function attach(session, sound = null) {
  await describe();
  await sound;
  if (session !== realtime) throw new Error("The session has ended.");
  await session.open(key);
  configure();
  sent = new Sent();
  const earlier = at("turns").querySelector("li:not(.unsent)");
  if (earlier) note("A new conversation: the model does not remember the turns above.");
}

// The connection is gone. ended: the server has ended the session.
async function lost(session, reason, ended) {
  if (session !== realtime) return;
  if (answer?.making) {
    answer.making = false;
    interrupt({ byServer: true });
  } else if (asked) {
    note("The connection was lost before the answer came: ask again.");
  }
  asked = unwanted = false;
  forget();
  turns.forEach((turn) => turn.unwritten());
  show();
  if (!ended) {
    starting = reopen(session);
    return;
  }
  await answer?.played();
  if (session !== realtime) return; // ended here
  end();
  problem(`${ENDS[reason] ?? `The connection ended: ${reason || "the server closed it"}.`} Press Start to continue.`);
}

async function reopen(session) {
  const wanted = () => session === realtime;
  const words = await again("The connection was lost.", () => attach(session), wanted);
  show();
  if (!words) return;
  await answer?.played();
  if (!wanted()) return;
  end();
  problem(words);
}

// Retry an action with growing delays while it is wanted, and show why. Returns a message for the
// user if all tries failed, else "".
async function again(words, action, wanted) {
  for (const delay_s of DELAYS_S) {
    problem(`${words} Trying again.`);
    await sleep(delay_s * (0.5 + Math.random()));
    if (!wanted()) return "";
    try {
      await action();
      if (wanted()) problem("");
      return "";
    } catch (error) {
      if (!wanted()) return ""; // End was pressed, which may be the cause
      words = error.message;
    }
    if (!at("key-form").hidden) return words; // another key is needed
  }
  return `${words} Press Start to try again.`;
}

// Open the microphone, once. The session may end while the user is asked for it.
async function listen() {
  if (microphone || opening || !realtime) return;
  const [session, made] = [realtime, new Microphone(hear, deaf)];
  opening = made;
  show();
  try {
    await made.open(at("microphone").value);
    if (opening === made) microphone = made;
    else made.close();
    await listDevices();
  } catch (error) {
    made.close();
    if (session === realtime) problem(error.message);
  }
  if (opening === made) opening = null;
}

// The microphone is gone.
function deaf() {
  hangUp();
  problem("The microphone was lost. Press Start to use another one.");
  show();
}

function hangUp() {
  microphone?.close();
  microphone = null;
  forget();
  level(0);
}

// Drop the user's unfinished turn.
function forget() {
  if (hearing) {
    hearing.root.remove();
    turns.delete(hearing.item);
  }
  hearing = held = null;
  realtime?.send("input_audio_buffer.clear");
}

function end() {
  const parts = [microphone, loudspeaker, camera, realtime];
  answer?.finish(true);
  forget();
  turns.forEach((turn) => turn.unwritten());
  microphone = opening = loudspeaker = camera = realtime = starting = null;
  answer = interrupting = null;
  asked = unwanted = muted = false;
  turns.clear();
  parts.forEach((part) => part?.close());
  level(0);
  show();
  status("Not connected", { aloud: true });
}

// Clear the conversation, and begin another session if the microphone was open.
async function renew() {
  const live = microphone !== null;
  end();
  answers = 0;
  forgetRecordings();
  clearTurns();
  problem("");
  status("Ready");
  announce("A new conversation");
  if (live) await start(true);
}

function configure() {
  if (!realtime?.ready) return;
  const transcription = model.transcribes_questions ? { model: model.id } : null;
  realtime.send("session.update", { session: sessionSettings(detection, transcription) });
}

// Ask the server for its model and voices, and show them. Throws an Error with words for the user.
async function describe() {
  const found = await describedModel(key);
  at("key-form").hidden = found !== null;
  if (found === null) {
    at("key").focus();
    throw new Error(key ? "The server does not know this key." : "This server asks for an API key.");
  }
  model = found;
  introduce(model);
  offerVoices((await voices(key)) ?? []);
}

// Show the model before the first session.
async function greet() {
  const wanted = () => !realtime;
  let words = "";
  try {
    await describe();
  } catch (error) {
    if (!wanted()) return; // Start says it
    const tried = at("key-form").hidden;
    if (tried) status("Connecting");
    words = tried ? await again(error.message, describe, wanted) : error.message;
    if (tried && wanted()) status(words ? "Not connected" : "Ready");
  }
  if (words) problem(words);
}

// Say what the checkpoint says of itself, with a button for each question that it answers.
function introduce({ id, introduction = "", questions = [] }) {
  write("model", id);
  write("introduction", introduction);
  at("introduction").hidden = !introduction;
  at("questions").hidden = !questions.length;
  if (at("questions").childElementCount === questions.length) return; // the focus may be on one
  const items = questions.map((question) => {
    const item = document.createElement("li");
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.textContent = question;
    button.addEventListener("click", quietly(() => sendText(question)));
    item.append(button);
    return item;
  });
  at("questions").replaceChildren(...items);
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
  if (realtime.send("input_audio_buffer.append", { audio: base64Of(samples) })) {
    sent.add(samples, hearing || held !== null);
  }
}

function press() {
  if (held !== null || !microphone || !realtime.ready) return;
  held = 0;
  begun = sent.end;
  stopReplay();
  realtime.send("input_audio_buffer.clear");
  interrupt();
  look();
  show();
}

async function release() {
  if (held === null) return;
  endOfQuestion = performance.now();
  await microphone.flush();
  if (held === null) return; // released by another event, or the session has ended
  const long = held >= (SHORTEST_MS * RATE) / 1000;
  held = null;
  spoken = sent.between(begun, sent.end);
  show();
  if (!long) {
    status("Hold the button while you speak", { aloud: true });
    return;
  }
  await interrupting;
  realtime?.send("input_audio_buffer.commit");
  respond();
}

function respond() {
  asked = true;
  realtime?.send("response.create", { event_id: RESPOND });
}

// Stop the current answer, and tell the server how much of it was played.
function interrupt({ byServer = false } = {}) {
  if (asked && !byServer && !unwanted) {
    unwanted = true;
    realtime.send("response.cancel");
  }
  if (!answer || answer.over || answer.dropped) return;
  answer.dropped = true;
  if (answer.making && !byServer) realtime.send("response.cancel");
  interrupting = silence(answer);
}

async function silence(stopped) {
  const { item, ms } = await loudspeaker.stop();
  stopped.finish(true);
  if (item === null) return;
  realtime?.send("conversation.item.truncate", { item_id: item, content_index: 0, audio_end_ms: ms });
}

// Begin a session if needed, and stop the current answer.
async function takeTurn() {
  stopReplay();
  await start(false);
  interrupt();
  await interrupting;
  if (!realtime?.ready) throw new Error("The session has ended.");
}

function add(...content) {
  const item = { type: "message", role: "user", content };
  realtime.send("conversation.item.create", { item });
}

function imageTurn(image_url, alt) {
  const turn = new UserTurn();
  turn.show(Object.assign(new Image(), { src: image_url, alt }));
  return turn;
}

// Return a recording of the user's last turn.
function recorded(pieces) {
  const number = at("turns").querySelectorAll(".user").length;
  const recording = new Recording(`question-${number}.wav`, interrupt);
  for (const piece of pieces) if (piece.length) recording.add(piece);
  return recording;
}

// Show a turn, and send it once there is a session. question: have it answered.
async function post(turn, content, question) {
  turn.unsent(true);
  try {
    await takeTurn();
  } catch (error) {
    turn.root.remove();
    throw error;
  }
  if (question) look();
  turn.unsent(false);
  add(...content);
  if (!question) return;
  endOfQuestion = performance.now();
  respond();
}

async function sendWritten(event) {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  try {
    await sendText(text);
  } catch (error) {
    at("text").value ||= text;
    throw error;
  }
}

async function sendText(text) {
  const turn = new UserTurn();
  turn.write(text);
  await post(turn, [{ type: "input_text", text }], true);
}

// An image waits for its question; a sound is a question.
async function sendFile(file) {
  const isImage = file.type.startsWith("image/");
  const found = await (isImage ? readImage : readSound)(file).catch(() => null);
  if (!found) {
    problem(`This browser can't open ${file.name}.`);
  } else if (isImage) {
    const content = [{ type: "input_image", image_url: found }];
    await post(imageTurn(found, `Image ${file.name}`), content, false);
    status("Now ask about the image", { aloud: true });
  } else if (found.length > MOST_FILE_S * RATE) {
    const advice = `Run: qwen3-omni-neuron transcribe ${file.name}`;
    problem(`${file.name} is longer than ${MOST_FILE_S / 60} minutes. ${advice}`);
  } else {
    const turn = new UserTurn();
    turn.write(file.name);
    turn.heard(recorded([found]));
    await post(turn, [{ type: "input_audio", audio: base64Of(found) }], true);
  }
}

// Show what the camera sees, before the question that it belongs to.
function look() {
  if (!camera?.sees) return;
  const image_url = camera.frame();
  imageTurn(image_url, "What the camera saw");
  add({ type: "input_image", image_url });
}

async function switchCamera() {
  const made = camera ? null : new Camera(at("view"), switchCamera);
  camera?.close();
  camera = made;
  try {
    await made?.open();
  } catch (error) {
    if (camera === made) camera = null;
    problem(error.message);
  }
  if (camera !== made) made?.close(); // it was switched off meanwhile
  announce(camera ? "The camera is on: a picture goes with each question." : "The camera is off.");
  show();
}

// The server's side.

const transcription = "conversation.item.input_audio_transcription";
const handlers = {
  "session.created": ({ session }) => {
    detection = session.audio.input.turn_detection;
    allowHandsFree(detection !== null);
  },
  "input_audio_buffer.speech_started": ({ item_id, audio_start_ms }) => {
    begun = (audio_start_ms * RATE) / 1000;
    stopReplay();
    interrupt({ byServer: true });
    look();
    hearing = userTurn(item_id);
    status("Hearing you");
  },
  "input_audio_buffer.speech_stopped": ({ audio_end_ms }) => {
    spoken = sent.between(begun, (audio_end_ms * RATE) / 1000);
    endOfQuestion = performance.now() - detection.silence_duration_ms;
    hearing = null;
  },
  "input_audio_buffer.committed": ({ item_id }) => {
    hearing = null;
    const turn = userTurn(item_id);
    turn.heard(recorded(spoken));
    spoken = [];
    if (!model.transcribes_questions) turn.unwritten();
  },
  [`${transcription}.delta`]: ({ item_id, delta }) => userTurn(item_id).add(delta),
  [`${transcription}.completed`]: ({ item_id, transcript }) => {
    userTurn(item_id).write(transcript);
    userTurn(item_id).unwritten();
  },
  [`${transcription}.failed`]: ({ item_id }) => userTurn(item_id).unwritten(),
  "response.created": ({ response }) => {
    answers += 1;
    const recording = new Recording(`answer-${answers}.wav`, interrupt);
    answer = new Answer(response.id, endOfQuestion, recording, renew);
    answer.dropped = unwanted;
    asked = unwanted = false;
    if (!answer.dropped) status("Thinking");
    show();
  },
  "response.output_audio_transcript.delta": ({ delta }) => answer.add(delta),
  "response.output_text.delta": ({ delta }) => answer.add(delta),
  "response.output_audio.delta": ({ response_id, item_id, delta }) => {
    answer.item = item_id;
    if (response_id !== answer.id || answer.dropped) return;
    const samples = samplesOf(delta);
    answer.recording.add(samples);
    loudspeaker.push(item_id, samples);
  },
  "response.output_audio.done": ({ item_id }) => loudspeaker.end(item_id),
  "response.done": ({ response }) => {
    answer.making = false;
    answer.fault = faultOf(response);
    if (answer.dropped) answer.finish(true);
    else if (!answer.item || response.status === "failed") answer.finish();
    show();
  },
  error: ({ error }) => {
    if (error.event_id === RESPOND) asked = unwanted = false;
    // The answer was complete before the cancel arrived.
    if (error.code !== "response_cancel_not_active") problem(error.message);
  },
};

// Why an answer is empty or not complete, in words for the user.
function faultOf({ status, status_details }) {
  if (status === "failed") return status_details.error.message;
  if (status === "incomplete") return "A limit of the server ended this answer.";
  return answer.text || answer.item ? "" : "The model ended its answer without a word.";
}

const answerOf = (item) => (item === answer?.item ? answer : null);
const heardFrom = {
  started: ({ item }) => {
    stopReplay();
    answerOf(item)?.started();
    status("Speaking");
    show();
  },
  underrun: ({ item }) => answerOf(item)?.gap(),
  finished: ({ item }) => {
    answerOf(item)?.finish();
    show();
  },
  report: ({ depth, underruns }) => {
    write("depth", `${(depth / RATE).toFixed(1)} s`);
    write("gaps", `${underruns}`);
    if (answer?.firstSound && !answer.over) answer.draw();
  },
};

function userTurn(item) {
  if (!turns.has(item)) {
    const turn = Object.assign(new UserTurn(), { item });
    turn.pending(true);
    turns.set(item, turn);
  }
  return turns.get(item);
}

// What the page shows.

function show() {
  const [does, says] = doing();
  const playing = Boolean(answer && !answer.over);
  at("talk-label").textContent = does;
  talk.classList.toggle("live", says === "Listening" || held !== null);
  talk.classList.toggle("off", muted);
  enable("stop", playing);
  enable("end", Boolean(realtime));
  at("camera").setAttribute("aria-pressed", Boolean(camera));
  if (realtime?.waits) status(realtime.waits);
  else if (realtime && !playing && !hearing) status(says);
}

function enable(id, yes) {
  if (!yes && document.activeElement === at(id)) talk.focus(); // a disabled button would lose it
  at(id).disabled = !yes;
}

// What the button does, and what happens now.
function doing() {
  if (!microphone) return ["Start", opening ? "Waiting for the microphone" : "Connected"];
  if (handsFree()) return muted ? ["Unmute", "Muted"] : ["Mute", "Listening"];
  return held === null ? ["Hold to talk", "Hold the button and speak"] : ["Release to send", "Hearing you"];
}

// Controls.

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
talk.addEventListener("click", quietly(async (event) => {
  if (!microphone) {
    await start(true);
    if (microphone) announce(at("status").textContent);
  } else if (handsFree()) {
    muted = !muted;
    show();
    announce(muted ? "Muted" : "Listening");
  } else if (event.detail === 0) {
    // A screen reader's click: it can't hold the button, so one begins and the next one ends.
    return held === null ? press() : release();
  }
}));
at("stop").addEventListener("click", () => {
  interrupt();
  interrupting?.then(show);
});
at("camera").addEventListener("click", quietly(switchCamera));
at("end").addEventListener("click", end);
at("composer").addEventListener("submit", quietly(sendWritten));
at("file").addEventListener("change", quietly(() => {
  const [file] = at("file").files;
  at("file").value = "";
  if (file) return sendFile(file);
}));
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", quietly((event) => {
  const [file] = event.dataTransfer.files;
  if (!file) return; // a text, for the field that it falls on
  event.preventDefault();
  return sendFile(file);
}));
at("save").addEventListener("click", () => download(new Blob([transcript()]), "conversation.txt"));
at("mode").addEventListener("change", () => {
  muted = false;
  forget();
  configure();
  show();
});
for (const id of ["voice", "language", "system"]) at(id).addEventListener("change", configure);
at("microphone").addEventListener("change", quietly(async () => {
  if (!microphone) return;
  hangUp();
  await listen();
  show();
}));
at("loudspeaker").addEventListener("change", () => {
  loudspeaker?.choose(at("loudspeaker").value).catch((error) => problem(error.message));
});
at("new").addEventListener("click", quietly(renew));
at("key-form").addEventListener("submit", quietly(async (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  problem("");
  try {
    await describe();
    status("Ready");
  } catch (error) {
    problem(error.message);
  }
}));

// Resume sound that was suspended, such as by a call.
for (const kind of ["visibilitychange", "click", "keydown"]) {
  document.addEventListener(kind, () => [loudspeaker, microphone].forEach((part) => part?.resume()));
}

at("settings").open = matchMedia("(min-width: 56rem)").matches;
at("loudspeaker-choice").hidden = !AudioContext.prototype.setSinkId;
navigator.mediaDevices?.addEventListener("devicechange", listDevices);
listDevices();
greet();
