"use strict";
// A dialogue in text by the AI SDK: generateText whole and streamed, and generateObject.
//
// node testing/clients/ai_node.cjs URL compatible|chat|responses

const { generateObject, generateText, isStepCount, streamText, tool } = require("ai");
const { z } = require("zod");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const calls = [];
const tools = {
  look_up: tool({
    description: "Look a word up.",
    inputSchema: z.object({ word: z.string() }),
    execute: async (given) => {
      calls.push(given);
      return "red";
    },
  }),
};

const MODELS = {
  // Without supportsStructuredOutputs it sends no schema, only that an object is wanted.
  compatible: (settings) =>
    createOpenAICompatible({ name: "compatible", supportsStructuredOutputs: true, ...settings })("gpt-4o"),
  chat: (settings) => createOpenAI(settings).chat("gpt-4o"),
  responses: (settings) => createOpenAI(settings)("gpt-4o"),
};

async function dialogue(url, way) {
  const model = MODELS[way]({ baseURL: `${url}/v1`, apiKey: "none" });
  const stopWhen = isStepCount(3);
  const messages = [{ role: "user", content: "look it up" }];
  const first = await generateText({ model, messages, tools, stopWhen, maxRetries: 0 });
  messages.push(...first.responseMessages);
  messages.push({ role: "user", content: "what is two plus four" });
  const second = streamText({ model, messages, tools, stopWhen, maxRetries: 0 });
  const last = await second.text;
  const { object } = await generateObject({
    model,
    schema: z.object({ colour: z.enum(["red", "blue"]) }),
    prompt: "say red",
    maxRetries: 0,
  });
  return { calls, answers: [first.text, last], object };
}

dialogue(...process.argv.slice(2)).then(
  (result) => process.stdout.write(JSON.stringify(result)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
