// The request as curl and as Python, in each protocol that the server speaks.

import { pretty } from "./dom.js";
import { bodyOf, extras, fileName, picturesOf } from "./request.js";

const [OPEN, CLOSE] = ["\u0000", "\u0000"]; // around what is no text: a call in Python, a file in a shell

/** By protocol: its route, the body of a chat completion as its own, and how its Python package asks and answers. */
const PROTOCOLS = {
  chat: {
    route: "/v1/chat/completions",
    image: (type, data) => `data:${type};base64,${data}`,
    body: (chat) => chat,
    package: "openai",
    client: (origin, key) => `OpenAI(base_url="${origin}/v1", api_key=${key})`,
    call: "client.chat.completions.create",
    own: [],
    print: ["choice = answer.choices[0]", "print(choice.message.content)"],
    from: "choice",
  },
  responses: {
    route: "/v1/responses",
    image: (type, data) => `data:${type};base64,${data}`,
    body: asResponse,
    package: "openai",
    client: (origin, key) => `OpenAI(base_url="${origin}/v1", api_key=${key})`,
    call: "client.responses.create",
    own: ["seed"],
    print: ["print(answer.output_text)"],
    from: "answer",
  },
  messages: {
    route: "/v1/messages",
    image: (type, data) => ({ type: "base64", media_type: type, data }),
    body: asMessage,
    package: "anthropic",
    client: (origin, key) => `Anthropic(base_url="${origin}", api_key=${key})`,
    call: "client.messages.create",
    own: ["seed", "temperature", "top_p", "top_k"], // of which the package from 2.14 on has none
    print: ["print(answer.content[0].text)"],
    from: "answer",
  },
};

const CLASSES = { openai: "OpenAI", anthropic: "Anthropic" };

function asResponse({ model, messages, max_tokens, ...rest }) {
  const part = ({ type, text, span, image_url }) =>
    type === "text"
      ? { type: "input_text", text, ...(span && { span }) }
      : { type: "input_image", image_url: image_url.url };
  const input = messages
    .filter(({ role }) => role !== "system")
    .map(({ role, content }) => ({ role, content: Array.isArray(content) ? content.map(part) : content }));
  const system = messages.find(({ role }) => role === "system");
  return { model, ...(system && { instructions: system.content }), input, max_output_tokens: max_tokens, ...rest };
}

function asMessage({ model, messages, ...rest }) {
  const part = (given) => (given.type === "text" ? given : { type: "image", source: given.image_url.url });
  const turns = messages
    .filter(({ role }) => role !== "system")
    .map(({ role, content }) => ({ role, content: Array.isArray(content) ? content.map(part) : content }));
  const system = messages.find(({ role }) => role === "system");
  return { model, ...(system && { system: system.content }), messages: turns, ...rest };
}

/** A shell command that reads the pictures from files. */
export function asCurl(form, origin, withKey, name) {
  const protocol = PROTOCOLS[name];
  const url = (picture, i) => protocol.image(picture.type, `${OPEN}${fileName(picture, i)}${CLOSE}`);
  const json = pretty(protocol.body(bodyOf(form, url)))
    .replace(/[\\$`]/g, "\\$&") // the shell reads the text between the EOFs
    .replace(/\\\\u0000(.*?)\\\\u0000/g, "$(base64 < $1 | tr -d '\\n')");
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $HELMSIGHT_API_KEY"' : "";
  return `curl ${origin}${protocol.route} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d @- <<EOF\n${json}\nEOF\n`;
}

/** A Python script with the protocol's package that prints the answer. */
export function asPython(form, origin, withKey, name) {
  const protocol = PROTOCOLS[name];
  const isData = name === "messages"; // else the whole URL is read from the file
  const url = (picture, i) =>
    isData
      ? protocol.image(picture.type, `${OPEN}picture("${fileName(picture, i)}")${CLOSE}`)
      : `${OPEN}picture("${fileName(picture, i)}", "${picture.type}")${CLOSE}`;
  const body = protocol.body(bodyOf(form, url));
  const extra = {};
  for (const field of [...protocol.own, ...Object.keys(extras(form))]) {
    if (field in body) extra[field] = body[field];
    delete body[field];
  }
  const parameters = Object.entries({ ...body, ...(Object.keys(extra).length && { extra_body: extra }) });
  const lines = parameters.map(([field, value]) => `    ${field}=${literal(value, 1)},`).join("\n");
  const imported = `from ${protocol.package} import ${CLASSES[protocol.package]}\n\n`;
  const helper = picturesOf(form).length
    ? `import base64\nfrom pathlib import Path\n\n${imported}\n${isData ? READ_DATA : READ_URL}\n\n`
    : imported;
  const key = withKey ? 'os.environ["HELMSIGHT_API_KEY"]' : '"none"';
  return `${withKey ? "import os\n" : ""}${helper}client = ${protocol.client(origin, key)}
answer = ${protocol.call}(
${lines}
)
${protocol.print.join("\n")}
${extra.diagnostics ? `print(${protocol.from}.diagnostics)\n` : ""}`;
}

const READ_URL = `def picture(path, kind):
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return f"data:{kind};base64,{data}"
`;
const READ_DATA = `def picture(path):
    return base64.b64encode(Path(path).read_bytes()).decode()
`;

function literal(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") {
    const call = /^\u0000(.*)\u0000$/.exec(value);
    return call ? call[1] : JSON.stringify(value); // JSON's escapes are Python's too
  }
  if (typeof value !== "object") return String(value);
  const list = Array.isArray(value);
  const items = list
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${literal(item, depth + 1)}`);
  const [open, close] = list ? "[]" : "{}";
  const flat = items.join(", ");
  if (flat.length + 4 * depth < 100 && !flat.includes("\n")) return `${open}${flat}${close}`;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${indent}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
