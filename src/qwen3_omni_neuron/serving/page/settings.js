// What the user has chosen in the settings.

const at = (id) => document.getElementById(id);

export const handsFree = () => document.querySelector("[name=mode]:checked").value === "hands-free";

// Where the server can't find turns, the user has to.
export function allowHandsFree(yes) {
  document.querySelector("[value=hands-free]").disabled = !yes;
  if (!yes) document.querySelector("[value=push]").checked = true;
}

export function offerVoices(names) {
  const chosen = at("voice").value;
  at("voice").replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) at("voice").value = chosen;
}

// Fields of a session. detection: how the server finds turns, null where it can't.
export function sessionSettings(detection, transcription) {
  const voice = at("voice").value;
  const language = at("language").value;
  const wishes = [at("system").value.trim(), language && `Answer in ${language}.`];
  return {
    type: "realtime",
    instructions: wishes.filter(Boolean).join("\n\n"),
    audio: {
      input: { turn_detection: handsFree() ? detection : null, transcription },
      output: voice ? { voice } : {},
    },
  };
}
