// What the server says: of itself over HTTP, and in the events of OpenAI's Realtime API.

const TIMEOUT_MS = 10_000;
const UNSENDABLE = "This key has characters that a browser can't send.";
const RESUME = "resume"; // id of the event that asks for an earlier session
const RESUME_TRIES = 3; // a second apart: another server may still be writing it
const NOTHING_THERE = ["session_not_found", "unsupported"]; // of a token that resumes nothing
const ENDED_CODES = [1000, 1008, 1009]; // of a server that would not take the connection again

export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// The connection to /v1/realtime. It can be opened again after it was lost, and goes on with its
// session where the server keeps sessions.
export class Realtime {
  // on: functions by the type of the event that they get. onLost(reason, ended): called when the
  // connection, once open, is gone; ended: the server has ended the session. token: of the session
  // to go on with, null for a new one.
  constructor(on, onLost, token) {
    Object.assign(this, { on, onLost, token, ready: false });
  }

  // Open the connection. Gives true where it goes on with the session of the token. Throws an Error
  // with words for the user.
  async open(key) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const names = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
    try {
      this.socket = new WebSocket(url, names);
    } catch {
      throw new Error(UNSENDABLE);
    }
    const { socket } = this; // one that was given up may still have something to tell
    const current = (action) => (event) => socket === this.socket && action(event);
    socket.addEventListener("message", current(({ data }) => this.take(JSON.parse(data))));
    socket.addEventListener("close", current(({ code, reason }) => this.closed(code, reason)));
    await this.until(({ type }) => type === "session.created");
    const resumed = this.token !== null && (await this.resume(this.token));
    this.token = this.offered; // a token is good once
    this.ready = true;
    return resumed;
  }

  async resume(resume_token) {
    const request = JSON.stringify({ type: "session.resume", event_id: RESUME, resume_token });
    for (let tries = 1; ; tries++) {
      this.socket.send(request);
      const answers = ({ type, error }) => type === "session.updated" || error?.event_id === RESUME;
      const { error } = await this.until(answers);
      if (!error) return true;
      if (error.code !== "session_not_found" || tries === RESUME_TRIES) {
        this.refusal = error;
        return false;
      }
      await sleep(1);
    }
  }

  // Wait for an event. Throws an Error with words for the user when the connection is gone before,
  // and closes it where the event does not come in time.
  until(matches) {
    const { socket } = this;
    let timer;
    const found = new Promise((resolve, reject) => {
      this.waiting = { matches, resolve, reject };
      timer = setTimeout(() => {
        reject(new Error(`The server did not answer within ${TIMEOUT_MS / 1000} s.`));
        socket.close();
      }, TIMEOUT_MS);
      if (socket.readyState > WebSocket.OPEN) this.closed();
    });
    return found.finally(() => clearTimeout(timer));
  }

  take(event) {
    if (event.session) this.offered = event.session.resume_token ?? null;
    if (this.ready) this.token = this.offered;
    if (event.error?.event_id !== RESUME) this.on[event.type]?.(event);
    if (this.waiting?.matches(event)) this.waiting.resolve(event);
  }

  closed(code, reason) {
    const words = "The server did not take the connection: it may be full, or still loading.";
    this.waiting?.reject(new Error(words));
    if (this.ready) this.onLost(reason, ENDED_CODES.includes(code));
    this.ready = false;
  }

  // Send an event. Gives false where there is no connection now.
  send(type, fields = {}) {
    const open = this.ready && this.socket.readyState === WebSocket.OPEN;
    if (open) this.socket.send(JSON.stringify({ type, ...fields }));
    return open;
  }

  // Have the server delete what it has stored of the session; wait for that for a second at most.
  async forget() {
    if (!this.token || !this.ready) return;
    this.send("session.update", { session: { type: "realtime", resume_token: null } });
    const deleted = this.until(({ session }) => session?.resume_token === null);
    await Promise.race([deleted.catch(() => {}), sleep(1)]);
  }

  // Have the server delete what it has stored of a session that has no connection: open one for
  // that. Throws an Error with words for the user; then it may be tried again.
  async deleteStored(key) {
    const { token } = this;
    try {
      if (await this.open(key)) {
        await this.forget();
        if (this.token) throw new Error("The server did not answer.");
      } else if (!NOTHING_THERE.includes(this.refusal.code)) {
        this.token = token;
        throw new Error(this.refusal.message);
      }
    } finally {
      this.close();
    }
  }

  close() {
    this.ready = false;
    this.socket?.close();
  }
}

// Ask the server for its model: its id, whether it transcribes questions, and its introduction and
// questions where it has them. Gives null where it wants another key.
export async function describedModel(key) {
  const models = await asked("v1/models", "data", key);
  return models && models[0];
}

// Ask the server for the names of its voices. Gives null where it wants another key.
export async function voices(key) {
  const found = await asked("v1/audio/voices", "voices", key);
  return found && found.map(({ id }) => id);
}

// Ask for one field of what is at a path. Throws an Error with words for the user.
async function asked(path, field, key) {
  let headers;
  try {
    headers = new Headers(key ? { authorization: `Bearer ${key}` } : {});
  } catch {
    throw new Error(UNSENDABLE);
  }
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const answer = await fetch(path, { headers, signal }).catch(() => null);
  if (!answer) throw new Error("The server can't be reached.");
  if (answer.status === 401) return null;
  const body = await answer.json().catch(() => ({})); // of something between here and the server
  if (!body[field]) throw new Error(body.error?.message ?? `The server answers ${answer.status}.`);
  return body[field];
}
