// A row of the journal as a link to the playground, as far as the journal keeps its request.

import { EMPTY } from "./form.js";
import { toFragment } from "./keep.js";

const OWN = ["steering", "baseline", "diagnostics", "omitted"];
const LENGTH = /^\(\d+ characters\)$/; // what is kept in place of a text that is not
const MARK = "Text context: ";

/** The link; pictures are never kept, vectors other than one toward a side cannot be set there. */
export function replayLink(row) {
  const asked = row.asked ?? {};
  const { steering, diagnostics } = asked;
  const { max_tokens: maxTokens = null, temperature = null, seed = null } = row.sampling ?? {};
  const others = Object.entries(asked).filter(([name, value]) => !OWN.includes(name) && value !== null);
  const form = {
    ...EMPTY,
    ...messagesOf(row.texts?.prompt ?? ""),
    ...(steering && !steering.vectors ? dial(steering) : {}),
    ...{ maxTokens, temperature, seed },
    baseline: asked.baseline ?? EMPTY.baseline,
    include: diagnostics ? (diagnostics.include ?? null) : [],
    interventions: JSON.parse(JSON.stringify(Object.fromEntries(others)), (_, value) => (LENGTH.test(value) ? undefined : value)),
    pictures: Array.from({ length: row.images ?? 0 }, () => ({ key: null })),
  };
  return `/#${toFragment(form)}`;
}

const dial = ({ toward = "vision", strength = 1, vector = EMPTY.vector }) => ({
  strength: toward === "text" ? -strength : strength,
  auto: toward === "auto",
  vector,
});

/** System, turns, context and question of a prompt as it is kept: "role: text" for each message. */
function messagesOf(prompt) {
  const [, ...parts] = prompt.split(/^(system|user|assistant): /m);
  const messages = [];
  for (let i = 0; i < parts.length; i += 2) messages.push({ role: parts[i], text: parts[i + 1].replace(/\n$/, "") });
  const form = { system: "", turns: [], context: "", question: "" };
  let asked = null;
  for (const { role, text } of messages) {
    if (role === "system") form.system = text;
    else if (role === "user") asked = split(text);
    else if (asked) {
      form.turns.push({ ...asked, answer: text, pictures: [] });
      asked = null;
    }
  }
  return { ...form, ...asked };
}

function split(text) {
  const end = text.indexOf("\n\n");
  return text.startsWith(MARK) && end > 0
    ? { context: text.slice(MARK.length, end), question: text.slice(end + 2) }
    : { context: "", question: text };
}
