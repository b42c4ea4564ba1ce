// What the server says: of itself over HTTP, and in the events of OpenAI's Realtime API.

const TIMEOUT_MS = 10_000;
const UNSENDABLE = "This key has characters that a browser can't send.";
const ENDED_CODES = [1000, 1008, 1009]; // after which the server would refuse a new connection

export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// The connection to /v1/realtime. It can be opened again, for a new session, after it was lost.
export class Realtime {
  // on: functions by the type of the event that they get. onLost(reason, ended): called when the
  // connection, once open, is gone; ended: the server has ended the session. waits: what the user
  // waits for.
  constructor(on, onLost) {
    Object.assign(this, { on, onLost, ready: false, waits: "Connecting" });
  }

  // Open the connection. Throws an Error with words for the user.
  async open(key) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const names = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
    try {
      this.socket = new WebSocket(url, names);
    } catch {
      throw new Error(UNSENDABLE);
    }
    const { socket } = this; // an abandoned socket may still send events
    const current = (action) => (event) => socket === this.socket && action(event);
    socket.addEventListener("message", current(({ data }) => this.take(JSON.parse(data))));
    socket.addEventListener("close", current(({ code, reason }) => this.closed(code, reason)));
    await this.until(({ type }) => type === "session.created");
    Object.assign(this, { ready: true, waits: "" });
  }

  // Wait for an event. Throws an Error with words for the user if the connection is lost first, and
  // closes it after a timeout.
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
    this.on[event.type]?.(event);
    if (this.waiting?.matches(event)) this.waiting.resolve(event);
  }

  closed(code, reason) {
    const words = "The server refused the connection: it may be full or still loading.";
    this.waiting?.reject(new Error(words));
    if (!this.ready) return;
    const ended = ENDED_CODES.includes(code);
    Object.assign(this, { ready: false, waits: ended ? "" : "Reconnecting" });
    this.onLost(reason, ended);
  }

  // Send an event. Returns false without a connection.
  send(type, fields = {}) {
    const open = this.ready && this.socket.readyState === WebSocket.OPEN;
    if (open) this.socket.send(JSON.stringify({ type, ...fields }));
    return open;
  }

  close() {
    this.ready = false;
    this.socket?.close();
  }
}

// Get the server's model: its id, whether it transcribes questions, and its introduction and
// questions, if any. Returns null if another key is needed.
export async function describedModel(key) {
  const models = await asked("v1/models", "data", key);
  return models && models[0];
}

// Get the names of the voices. Returns null if another key is needed.
export async function voices(key) {
  const found = await asked("v1/audio/voices", "voices", key);
  return found && found.map(({ id }) => id);
}

// Get one field of the JSON at a path. Throws an Error with words for the user.
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
  const body = await answer.json().catch(() => ({})); // a proxy's answer
  if (!body[field]) throw new Error(body.error?.message ?? `The server answered ${answer.status}.`);
  return body[field];
}
