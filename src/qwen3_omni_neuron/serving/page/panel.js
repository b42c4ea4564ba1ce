// What the panel shows: what happens now, problems, and the level of the microphone.

import { announce } from "./conversation.js";

const at = (id) => document.getElementById(id);

export function write(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// aloud: screen readers read it out. What sounds itself they leave alone: they would be heard by the
// microphone.
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
