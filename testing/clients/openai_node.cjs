"use strict";
// A spoken dialogue by openai-node's realtime connection: node openai_node.cjs URL CLIPS

const { OpenAI } = require("openai");
const { OpenAIRealtimeWS } = require("openai/realtime/ws");
const { Dialogue, Microphone, fail } = require("./microphone.cjs");

const TOOL = {
  type: "function",
  name: "look_up",
  description: "Look a word up.",
  parameters: { type: "object", properties: { word: { type: "string" } } },
};

const [url, clips] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const connection = new OpenAIRealtimeWS({ model: "gpt-realtime" }, client);
const microphone = new Microphone(clips, (piece) =>
  connection.send({ type: "input_audio_buffer.append", audio: piece.toString("base64") }),
);
const dialogue = new Dialogue(microphone);

connection.on("error", fail);
connection.on("session.created", () => {
  connection.send({ type: "session.update", session: { type: "realtime", tools: [TOOL] } });
});
connection.on("session.updated", () => {
  microphone.run();
  microphone.say("question");
});
connection.on("response.output_audio.delta", (event) =>
  dialogue.heard(event.item_id, Buffer.from(event.delta, "base64").length),
);
connection.on("conversation.item.truncated", (event) => dialogue.cut(event.item_id));
connection.on("response.done", ({ response }) => {
  for (const item of response.output) {
    if (item.type === "message" && response.status === "cancelled") dialogue.cut(item.id);
    if (item.type === "message") dialogue.ended(item.id, item.content[0].transcript);
    if (item.type !== "function_call") continue;
    dialogue.calls.push(JSON.parse(item.arguments));
    const result = { type: "function_call_output", call_id: item.call_id, output: "red" };
    connection.send({ type: "conversation.item.create", item: result });
    connection.send({ type: "response.create" });
  }
});
