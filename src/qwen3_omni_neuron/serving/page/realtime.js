// The socket to /v1/realtime, in the events of OpenAI's Realtime API.

const UNSENDABLE = "This key has characters that a browser can't send.";

export class Realtime {
  // on: functions by the type of the event that they get.
  constructor(on) {
    this.on = on;
  }

  // Throws an Error with words for the user. onClose(reason): called once it is open and ends.
  open(key, onClose) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const names = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
    return new Promise((resolve, reject) => {
      try {
        this.socket = new WebSocket(url, names);
      } catch {
        reject(new Error(UNSENDABLE));
        return;
      }
      let opened = false;
      this.socket.addEventListener("open", () => (opened = true));
      this.socket.addEventListener("message", ({ data }) => {
        const event = JSON.parse(data);
        this.on[event.type]?.(event);
        if (event.type === "session.created") resolve();
      });
      this.socket.addEventListener("close", ({ reason }) => {
        reject(new Error("The server did not take the connection: it may be full, or still loading."));
        if (opened) onClose(reason);
      });
    });
  }

  send(type, fields = {}) {
    if (this.socket.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ type, ...fields }));
    }
  }

  close() {
    this.socket?.close();
  }
}

// Ask the server for the names of its voices. Gives null where it wants another key.
export async function voices(key) {
  const found = await asked("v1/audio/voices", "voices", key);
  return found && found.map(({ id }) => id);
}

// Ask the server for its model: its id, and its introduction and questions where it has them. Gives
// null where it wants another key.
export async function describedModel(key) {
  const models = await asked("v1/models", "data", key);
  return models && models[0];
}

// Ask for one field of what is at a path.
async function asked(path, field, key) {
  let headers;
  try {
    headers = new Headers(key ? { authorization: `Bearer ${key}` } : {});
  } catch {
    throw new Error(UNSENDABLE);
  }
  const answer = await fetch(path, { headers }).catch(() => null);
  if (!answer) throw new Error("The server does not answer.");
  if (answer.status === 401) return null;
  const body = await answer.json().catch(() => ({})); // of something between here and the server
  if (!body[field]) throw new Error(body.error?.message ?? `The server answers ${answer.status}.`);
  return body[field];
}
