// What the form holds as the body of a chat completion, and that body as curl and as Python.

import { pretty } from "./dom.js";

/** The pictures of a form, those of earlier turns first. */
export const picturesOf = (form) => [...form.turns, form].flatMap(({ pictures }) => pictures);

/** The body of the request. `form` is what `readForm` of form.js gives; pictures become what `url(picture, i)` gives. */
export function bodyOf(form, url) {
  let count = 0;
  const asked = ({ pictures, context, question }) => {
    const content = pictures.map((picture) => ({ type: "image_url", image_url: { url: url(picture, count++) } }));
    if (context) content.push({ type: "text", text: marked(context), span: "context" });
    return { role: "user", content: [...content, { type: "text", text: question }] };
  };
  const body = {
    model: form.model,
    messages: [
      ...(form.system ? [{ role: "system", content: form.system }] : []),
      ...form.turns.flatMap((turn) => [asked(turn), { role: "assistant", content: turn.answer }]),
      asked(form),
    ],
    max_tokens: form.maxTokens,
    temperature: form.temperature,
  };
  if (form.seed !== null) body.seed = form.seed;
  return { ...body, ...extras(form) };
}

/** The fields beyond OpenAI's. */
export function extras(form) {
  const fields = {};
  if (form.strength !== 0) {
    const vector = form.vector === "modality-preference" ? {} : { vector: form.vector };
    const toward = form.auto ? "auto" : form.strength > 0 ? "vision" : "text";
    const when = form.when ? { when: { vector: form.when } } : {};
    fields.steering = { ...vector, toward, strength: Math.abs(form.strength), ...when };
  }
  Object.assign(fields, form.interventions);
  if (form.baseline && Object.keys(fields).length) fields.baseline = true;
  if (form.guard) fields.guard = form.guard;
  if (form.include.length) fields.diagnostics = { include: form.include };
  return fields;
}

// The form of the papers' prompts; the parts of a message are put together as they are, so the line ends here.
function marked(context) {
  return `${/^text context:/i.test(context) ? "" : "Text context: "}${context}\n`;
}

export const fileName = (picture, i) => `image${i + 1}.${picture.extension}`;

/** A shell command that reads the pictures from files. */
export function asCurl(form, origin, withKey) {
  const data = (picture, i) => `data:${picture.type};base64,\u0000${fileName(picture, i)}\u0000`;
  const json = pretty(bodyOf(form, data))
    .replace(/[\\$`]/g, "\\$&") // the shell reads the text between the EOFs
    .replace(/\\\\u0000(.*?)\\\\u0000/g, "$(base64 < $1 | tr -d '\\n')");
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $HELMSIGHT_API_KEY"' : "";
  return `curl ${origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d @- <<EOF\n${json}\nEOF\n`;
}

/** A Python script with the openai package that prints the answer. */
export function asPython(form, origin, withKey) {
  const place = (picture, i) => `\u0000picture("${fileName(picture, i)}", "${picture.type}")\u0000`;
  const { model, messages, ...rest } = bodyOf(form, place);
  const extra = extras(form);
  for (const name of Object.keys(extra)) delete rest[name];
  const parameters = Object.entries({
    model,
    messages,
    ...rest,
    ...(Object.keys(extra).length ? { extra_body: extra } : {}),
  });
  const lines = parameters.map(([name, value]) => `    ${name}=${literal(value, 1)},`).join("\n");
  const helper = picturesOf(form).length
    ? `import base64\nfrom pathlib import Path\n\nfrom openai import OpenAI\n\n\ndef picture(path, kind):
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return f"data:{kind};base64,{data}"\n\n\n`
    : "from openai import OpenAI\n\n";
  const key = withKey ? 'os.environ["HELMSIGHT_API_KEY"]' : '"none"';
  return `${withKey ? "import os\n" : ""}${helper}client = OpenAI(base_url="${origin}/v1", api_key=${key})
answer = client.chat.completions.create(
${lines}
)
choice = answer.choices[0]
print(choice.message.content)
${extra.diagnostics ? "print(choice.diagnostics)\n" : ""}`;
}

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
