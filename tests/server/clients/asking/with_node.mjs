// The openai package of npm: what its README shows.
import { readFileSync } from "node:fs";
import process from "node:process";

const folder = `${process.env.NODE_MODULES}/openai`;
const { default: OpenAI } = await import(`${folder}/index.mjs`);
const client = new OpenAI({ maxRetries: 0 });
const model = "helmsight-demo";
const text = "What colour is it?";
const messages = [{ role: "user", content: text }];
const shown = [{ role: "user", content: [{ type: "text", text }, { type: "image_url", image_url: { url: process.env.PICTURE } }] }];
const schema = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "green", "blue"] }, sure: { type: "boolean" } },
  required: ["colour", "sure"],
  additionalProperties: false,
};
const form = { type: "json_schema", json_schema: { name: "colour", strict: true, schema } };
const tools = [{ type: "function", function: { name: "colour", strict: true, parameters: schema } }];

async function see(what, call) {
  try {
    console.log(`${what}:`, JSON.stringify(await call()).slice(0, 300));
  } catch (error) {
    console.log(`${what}: raised ${error.constructor.name}: ${error.message}`);
  }
}

const ask = (more) => client.chat.completions.create({ model, messages, ...more });
await see("models", async () => (await client.models.list()).data.map((one) => one.id));
await see("plain", async () => (await ask()).choices[0].message.content);
await see("stream", async () => {
  const said = [];
  for await (const chunk of await ask({ stream: true })) said.push(chunk.choices[0]?.delta?.content);
  return said;
});
await see("picture", async () => (await ask({ messages: shown })).choices[0].message.content);
await see("parse", async () =>
  (await client.chat.completions.parse({ model, messages: shown, response_format: form })).choices[0].message);
await see("stream helper", async () =>
  client.chat.completions.stream({ model, messages, response_format: form, stream_options: { include_usage: true } })
    .finalChatCompletion());
await see("tools", () => ask({ tools }));
await see("no such model", () => ask({ model: "gpt-4o" }));
console.log(JSON.stringify({ client: "openai (Node)", version: JSON.parse(readFileSync(`${folder}/package.json`)).version }));
