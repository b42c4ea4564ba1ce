"use strict";
// A dialogue in text by the agent of OpenAI's Agents SDK for JavaScript, which calls the tool by
// itself: node openai_agents_text_node.cjs URL chat|responses

const { Agent, OpenAIProvider, Runner, setTracingDisabled, tool, user } = require("@openai/agents");
const { z } = require("zod");

const calls = [];
const lookUp = tool({
  name: "look_up",
  description: "Look a word up.",
  parameters: z.object({ word: z.string() }),
  execute: async (given) => {
    calls.push(given);
    return "red";
  },
});

async function dialogue(url, way) {
  setTracingDisabled(true); // traces go to OpenAI
  const modelProvider = new OpenAIProvider({
    baseURL: `${url}/v1`,
    apiKey: "none",
    useResponses: way === "responses",
  });
  const runner = new Runner({ modelProvider });
  const agent = new Agent({ name: "Assistant", tools: [lookUp] });
  const first = await runner.run(agent, "look it up");
  const messages = [...first.history, user("what is two plus four")];
  const second = await runner.run(agent, messages, { stream: true });
  await second.completed;
  return { calls, answers: [first.finalOutput, second.finalOutput] };
}

dialogue(...process.argv.slice(2)).then(
  (result) => process.stdout.write(JSON.stringify(result)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
