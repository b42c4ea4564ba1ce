// The forms of /docs: each sends its example, which may be changed, and shows what is answered.

const PLACE = /\{(\w+)[^}]*\}/g; // in a path, such as {response_id}

async function send(form) {
  const { method, path, type } = form.dataset;
  const fields = new FormData(form);
  const placed = path.replace(PLACE, (_, name) => encodeURIComponent(fields.get(name)));
  const headers = new Headers();
  const key = document.getElementById("key").value;
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (type === "application/json") headers.set("content-type", type);
  const body = type === "application/json" ? fields.get("body") : type ? fields : null;
  const answer = await fetch(`.${placed}`, { method, headers, body });
  return [answer.status, await shown(answer)];
}

// An element with the body of an answer.
async function shown(answer) {
  const type = answer.headers.get("content-type") ?? "";
  if (type.startsWith("audio/")) {
    const src = URL.createObjectURL(await answer.blob());
    return Object.assign(document.createElement("audio"), { controls: true, src });
  }
  const text = await answer.text();
  const made = Object.assign(document.createElement("pre"), { tabIndex: 0 });
  made.textContent = type === "application/json" ? JSON.stringify(JSON.parse(text), null, 2) : text;
  return made;
}

for (const form of document.forms) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const output = form.querySelector("output");
    output.replaceChildren("Waiting for the answer");
    const parts = await send(form).catch((error) => [error.message]);
    output.replaceChildren(...parts);
  });
}
