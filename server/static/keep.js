// What a person has asked, kept in this browser (the form in web storage, pictures and answers in IndexedDB), and the form
// as the fragment of a link.
//
// Parameters of the fragment, all optional: question, context, system, pictures (names of the model's sample pictures, * for
// one that a link does not hold), strength (signed, + is toward the image), auto, vector, when (a condition's vector), max_tokens, temperature, seed,
// baseline (0: none), readouts (names), asked (JSON: a request's other interventions), guard (JSON), turns (JSON).

import { EMPTY } from "./form.js";
import { read, write } from "./storage.js";
import { createStore, del, delMany, entries, get, keys, set } from "./vendor/keyval.js";

const DRAFT = "helmsight.draft";
const MOST = 40; // answers that are kept
const DAY = 86_400_000; // in the unit of keys, which begin with the time at which a picture was taken
const pictures = storeOf("helmsight-pictures", "pictures");
const answers = storeOf("helmsight-answers", "answers");

/** A store whose writes are committed at once: a browser drops others when the page is left in the same moment. Where it allows
 * no storage, the promises of the store are rejected. */
function storeOf(database, name) {
  const store = createStore(database, name);
  return async (mode, use) =>
    store(mode, (objects) => {
      const done = use(objects);
      if (mode === "readwrite") objects.transaction.commit();
      return done;
    });
}

/** Without storage, as in some private windows, nothing is kept and everything else works. */
const quietly = (promise, otherwise) => promise.catch(() => otherwise);

// A page that is left cannot wait until a database is open.
for (const store of [pictures, answers]) quietly(keys(store));

/** A picture as it is kept apart from its bytes. */
const reference = ({ key, name }) => ({ key, name });
const referring = (form) => ({
  ...form,
  pictures: form.pictures.map(reference),
  turns: form.turns.map((turn) => ({ ...turn, pictures: turn.pictures.map(reference) })),
});
const keysOf = (form) => [...form.turns, form].flatMap((turn) => turn.pictures.map(({ key }) => key));

// ------------------------------------------------------------------------------------------------- the draft

/** Keep the form as it stands, with the address's fragment and what else is shown. A tab keeps its own; a new one begins with
 * the latest. */
export function keepDraft(form, more) {
  const text = JSON.stringify({ ...more, form: referring(form), fragment: location.hash.slice(1) });
  for (const kind of ["sessionStorage", "localStorage"]) write(kind, DRAFT, text);
}

/** {form, ...} as it was kept, null where nothing was; pictures still are references. */
export function keptDraft() {
  try {
    const kept = JSON.parse(read("sessionStorage", DRAFT) ?? read("localStorage", DRAFT));
    return kept && { ...kept, form: { ...EMPTY, ...kept.form } };
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------------------------------------- the pictures

export const keepPicture = ({ key, name, url, type }) => quietly(set(key, { name, url, type }, pictures));

/** {name, url, type} of a picture, null where it was not kept. */
export const keptPicture = async (key) => (await quietly(get(key, pictures), null)) ?? null;

// ----------------------------------------------------------------------------------------------- the answers

/** Keep an entry {form, results} and return its number; the oldest go, with pictures that nothing shows any more. */
export function keepAnswer(entry) {
  const time = Date.now();
  quietly(set(time, { ...entry, time, form: referring(entry.form) }, answers)).then(() => forget(MOST));
  return time;
}

export const keptAnswer = async (time) => (await quietly(get(time, answers), null)) ?? null;

/** The entries, latest first. */
export const keptAnswers = async () =>
  (await quietly(entries(answers), [])).map(([, entry]) => entry).sort((a, b) => b.time - a.time);

/** Forget all answers but the latest `rest`, and pictures that neither they nor the form need. */
export async function forget(rest) {
  const all = await keptAnswers();
  await Promise.all(all.slice(rest).map(({ time }) => quietly(del(time, answers))));
  const draft = keptDraft();
  const used = new Set([...all.slice(0, rest), ...(draft ? [draft] : [])].flatMap(({ form }) => keysOf(form)));
  const young = Date.now() - DAY; // what another tab has just taken is in no draft that this one sees
  const idle = (await quietly(keys(pictures), [])).filter((key) => !used.has(key) && !(Number.parseInt(key, 10) > young));
  await quietly(delMany(idle, pictures));
}

// -------------------------------------------------------------------------------------------------- the link

const SAMPLE = "sample:";

/** The key of a sample's picture, which is asked of the server instead of kept. */
export const sampleKey = (name) => SAMPLE + name;
export const sampleName = (key) => (key.startsWith(SAMPLE) ? key.slice(SAMPLE.length) : null);

const namesOf = (list) => list.map(({ key }) => (key && sampleName(key)) || "*").join(",");
const picturesOf = (names) =>
  (names ? names.split(",") : []).map((name) => (name === "*" ? { key: null, name } : { key: sampleKey(name), name }));
const turnsOf = (turns) =>
  turns.map(({ context = "", question = "", answer = "", pictures: names }) => ({
    ...{ context: String(context), question: String(question), answer: String(answer) },
    pictures: picturesOf(names),
  }));

/** [parameter, field, as text, and back] */
const text = [String, String];
const number = [String, (value) => (Number.isFinite(Number(value)) ? Number(value) : null)];
const json = [JSON.stringify, JSON.parse];
const PARAMETERS = [
  ["question", "question", ...text],
  ["context", "context", ...text],
  ["system", "system", ...text],
  ["pictures", "pictures", namesOf, picturesOf],
  ["strength", "strength", ...number],
  ["auto", "auto", Number, (value) => value === "1"],
  ["vector", "vector", ...text],
  ["when", "when", ...text],
  ["max_tokens", "maxTokens", ...number],
  ["temperature", "temperature", ...number],
  ["seed", "seed", ...number],
  ["baseline", "baseline", Number, (value) => value !== "0"],
  ["readouts", "include", String, (value) => value.split(",").filter(Boolean)],
  ["asked", "interventions", ...json],
  ["guard", "guard", ...json],
  [
    "turns",
    "turns",
    (turns) => JSON.stringify(turns.map((turn) => ({ ...turn, pictures: namesOf(turn.pictures) }))),
    (value) => turnsOf(JSON.parse(value)),
  ],
];
let usual = null;

/** Say which readouts are asked for where nothing else is said; links leave them out. */
export const setUsual = (names) => (usual = names);

/** The form as a fragment without #, empty where it is an empty form. */
export function toFragment(form) {
  const standard = { ...EMPTY, include: usual };
  const said = PARAMETERS.flatMap(([name, field, write]) =>
    form[field] === null || JSON.stringify(form[field]) === JSON.stringify(standard[field])
      ? []
      : [[name, String(write(form[field]))]],
  );
  return new URLSearchParams(said).toString();
}

/** The form of a fragment; null where it holds none. What is not understood is left out. */
export function fromFragment(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const form = {};
  for (const [name, field, , read] of PARAMETERS)
    if (given.has(name))
      try {
        form[field] = read(given.get(name));
      } catch {
        // a link that was cut or written by hand
      }
  return Object.keys(form).length ? { ...EMPTY, ...form } : null;
}
