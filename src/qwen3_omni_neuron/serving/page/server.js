// What the server says of itself over HTTP.

export const TIMEOUT_MS = 10_000;
export const UNSENDABLE = "This key has characters that a browser can't send.";

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
