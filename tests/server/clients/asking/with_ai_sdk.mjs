// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import { readFileSync } from "node:fs";
import process from "node:process";

const folder = process.env.NODE_MODULES;
const { generateText, streamText, generateObject, Output, tool } = await import(`${folder}/ai/dist/index.js`);
const { createOpenAICompatible } = await import(`${folder}/@ai-sdk/openai-compatible/dist/index.js`);
const { z } = await import(`${folder}/zod/index.js`);
const served = createOpenAICompatible({
  name: "helmsight", baseURL: process.env.OPENAI_BASE_URL, supportsStructuredOutputs: true, includeUsage: true,
});
const model = served("helmsight-demo");
const text = "What colour is it?";
const image = Buffer.from(process.env.PICTURE.split(",")[1], "base64");
const schema = z.object({ colour: z.enum(["red", "green", "blue"]), sure: z.boolean() });
const messages = [{ role: "user", content: [{ type: "text", text }, { type: "image", image, mediaType: "image/png" }] }];
const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => "Fine." });

async function see(what, call) {
  try {
    console.log(`${what}:`, JSON.stringify(await call()).slice(0, 300));
  } catch (error) {
    console.log(`${what}: raised ${error.constructor.name}: ${error.message}`);
  }
}

const ask = { model, prompt: text, maxRetries: 0 };
await see("plain", async () => (await generateText({ ...ask, system: "Be brief." })).text);
await see("stream", async () => {
  const result = streamText(ask);
  const said = [];
  for await (const piece of result.textStream) said.push(piece);
  return [said, await result.usage];
});
await see("picture", async () => (await generateText({ model, messages, maxRetries: 0 })).text);
await see("object", async () => (await generateObject({ model, messages, schema, maxRetries: 0 })).object);
await see("output", async () => (await generateText({ ...ask, output: Output.object({ schema }) })).output);
await see("tools", async () => (await generateText({ ...ask, tools: { weather } })).text);
await see("no such model", async () => (await generateText({ ...ask, model: served("gpt-4o") })).text);
const { version } = JSON.parse(readFileSync(`${folder}/@ai-sdk/openai-compatible/package.json`));
console.log(JSON.stringify({ client: "@ai-sdk/openai-compatible", version }));
