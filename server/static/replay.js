// A row of the journal as a link to the playground, as far as the journal keeps its request.

import { EMPTY } from "./form.js";
import { toFragment } from "./keep.js";

const OWN = [
  "steering",
  "baseline",
  "diagnostics",
  "omitted",
  "force",
  "preset",
  "skipped",
  "min_pixels",
  "max_pixels",
  "chat_template_kwargs",
  "continue_final_message",
];
const LENGTH = /^\(\d+ characters\)$/; // what is kept in place of a text that is not
const LONGEST = 256; // characters that are kept of one that is
const CUT = "…";
const MARK = "Text context: ";

/** Whether only the end of a prompt was kept: a whole one begins with a role. */
export const isCut = (prompt) => prompt?.startsWith(CUT) ?? false;

/** {href, lacks}: the link, and in words what it does not hold of what the journal has not kept whole. Pictures are never
 * kept, vectors other than one toward a side cannot be set there. */
export function replay(row) {
  const asked = row.asked ?? {};
  const { steering, diagnostics } = asked;
  const { max_tokens: maxTokens = null, temperature = null, seed = null } = row.sampling ?? {};
  const others = Object.entries(asked).filter(([name, value]) => !OWN.includes(name) && value !== null);
  const prompt = row.texts?.prompt ?? null;
  let whole = true;
  const interventions = JSON.parse(JSON.stringify(Object.fromEntries(others)), (_, value) => {
    if (!isShortened(value)) return value;
    whole = false;
    return undefined;
  });
  const lacks = [
    prompt === null && "its prompt, which was not kept",
    isCut(prompt) && "its prompt, of which only the end was kept",
    asked.omitted && "the requested options, which were too long to keep",
    asked.force && "its forced answer, which was not kept as such",
    asked.chat_template_kwargs && "the arguments of its chat template",
    asked.continue_final_message && "the fact that it continued an assistant message",
    !whole && "a text of an intervention, which was not kept whole",
  ].filter(Boolean);
  const form = {
    ...EMPTY,
    ...messagesOf(isCut(prompt) ? "" : (prompt ?? "")),
    ...(steering && !steering.vectors ? dial(steering) : {}),
    ...{ maxTokens, temperature, seed },
    baseline: asked.baseline ?? EMPTY.baseline,
    include: diagnostics ? (diagnostics.include ?? null) : [],
    interventions,
    pictures: Array.from({ length: row.images ?? 0 }, () => ({ key: null })),
  };
  return { href: `/#${toFragment(form)}`, lacks };
}

const isShortened = (value) =>
  typeof value === "string" && (LENGTH.test(value) || (value.endsWith(CUT) && [...value].length === LONGEST));

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
