"use strict";
// A spoken dialogue by OpenAI's Agents SDK for JavaScript over a WebSocket; it calls the tool by
// itself: node openai_agents_node.cjs URL CLIPS

const { RealtimeAgent, RealtimeSession, tool } = require("@openai/agents-realtime");
const { z } = require("zod");
const { Dialogue, Microphone, fail } = require("./microphone.cjs");

const [url, clips] = process.argv.slice(2);
const lookUp = tool({
  name: "look_up",
  description: "Look a word up.",
  parameters: z.object({ word: z.string() }),
  execute: async ({ word }) => {
    dialogue.calls.push({ word });
    return "red";
  },
});
const agent = new RealtimeAgent({ name: "Assistant", tools: [lookUp] });
const session = new RealtimeSession(agent, { transport: "websocket" });
const microphone = new Microphone(clips, (piece) => session.sendAudio(piece.buffer));
const dialogue = new Dialogue(microphone);
let playing; // item whose sound came last

session.on("error", fail);
session.on("audio", (event) => dialogue.heard(playing, event.data.byteLength));
session.on("audio_interrupted", () => {
  // It is said of an answer that was played to its end, too.
  if (dialogue.sound.size === 2) dialogue.interrupted.push(playing);
});
session.on("transport_event", (event) => {
  if (event.type === "response.output_audio.delta") playing = event.item_id;
  if (event.type !== "response.done") return;
  for (const item of event.response.output) {
    if (item.type === "message") dialogue.ended(item.id, item.content[0].transcript);
  }
});
session
  .connect({ url: `${url.replace("http", "ws")}/v1/realtime`, apiKey: "none" })
  .then(() => {
    microphone.run();
    microphone.say("question");
  })
  .catch(fail);
