"use strict";
// A dialogue in text by LangChain's chat model for JavaScript: turns whole and streamed.
//
// node testing/clients/langchain_node.cjs URL chat|responses

const { HumanMessage, ToolMessage } = require("@langchain/core/messages");
const { tool } = require("@langchain/core/tools");
const { ChatOpenAI } = require("@langchain/openai");
const { z } = require("zod");

const lookUp = tool(async () => "red", {
  name: "look_up",
  description: "Look a word up.",
  schema: z.object({ word: z.string() }),
});

async function dialogue(url, way) {
  const model = new ChatOpenAI({
    model: "gpt-4o",
    apiKey: "none",
    maxRetries: 0,
    useResponsesApi: way === "responses",
    configuration: { baseURL: `${url}/v1` },
  });
  const withTools = model.bindTools([lookUp]);
  const messages = [new HumanMessage("look it up")];
  const asked = await withTools.invoke(messages);
  messages.push(asked);
  const calls = asked.tool_calls.map((call) => call.args);
  for (const call of asked.tool_calls)
    messages.push(new ToolMessage({ content: await lookUp.invoke(call.args), tool_call_id: call.id }));
  const first = await withTools.invoke(messages);
  messages.push(first, new HumanMessage("what is two plus four"));
  let second;
  for await (const chunk of await withTools.stream(messages))
    second = second === undefined ? chunk : second.concat(chunk);
  const schema = z.object({ colour: z.enum(["red", "blue"]) });
  const object = await model.withStructuredOutput(schema).invoke("say red");
  return { calls, answers: [first.text, second.text], object };
}

dialogue(...process.argv.slice(2)).then(
  (result) => process.stdout.write(JSON.stringify(result)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
