// The panel: what happens now, problems, the level of the microphone, and what the user has chosen.

const at = (id) => document.getElementById(id);

export function write(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// Have screen readers read something out.
export function announce(text) {
  at("announcement").textContent = text;
}

// aloud: screen readers read it out. Not while sound plays: the microphone would hear them.
export function status(text, { aloud = false } = {}) {
  write("status", text);
  if (aloud) announce(text);
}

export function problem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

export function level(peak) {
  // From -60 dB to full scale.
  const share = Math.max(0, Math.min(1, 1 + Math.log10(peak + 1e-6) / 3));
  at("stage").style.setProperty("--level", share.toFixed(3));
  const tens = `${10 * Math.round(10 * share)}`;
  if (at("level").getAttribute("aria-valuenow") !== tens) {
    at("level").setAttribute("aria-valuenow", tens);
  }
}

export const handsFree = () => document.querySelector("[name=mode]:checked").value === "hands-free";

// Without turn detection the user ends turns.
export function allowHandsFree(yes) {
  document.querySelector("[value=hands-free]").disabled = !yes;
  if (!yes) document.querySelector("[value=push]").checked = true;
}

export function offerVoices(names) {
  const chosen = at("voice").value;
  const options = names.map((name) => new Option(name, name));
  at("voice").replaceChildren(new Option("Default", ""), ...options);
  if (names.includes(chosen)) at("voice").value = chosen;
}

// Fields of a session. detection: the server's turn detection, or null.
export function sessionSettings(detection, transcription) {
  const voice = at("voice").value;
  const language = at("language").value;
  const wishes = [at("system").value.trim(), language && `Answer in ${language}.`];
  return {
    type: "realtime",
    instructions: wishes.filter(Boolean).join("\n\n"),
    audio: {
      input: { turn_detection: handsFree() ? detection : null, transcription },
      output: { voice: voice || null },
    },
  };
}
