// One option of an intervention as a field of the form, by its JSON schema.

import { h } from "./dom.js";
import { words } from "./names.js";

/** A field of a form: `element` is what is shown; `value()` gives undefined where the default stands, which `set(undefined)`
 * brings back. */
export function field(id, name, property, definitions) {
  const { spec, optional } = resolved(property, definitions);
  const make = spec.enum || "const" in spec ? choice : (MAKERS[spec.type] ?? json);
  const { input, read, write } = make(spec, property.default ?? null, optional);
  input.id = id;
  const element = h("label", { class: `option ${input.type}`, for: id, title: hint(property, spec) }, words(name), input);
  const value = () => {
    const found = read();
    return found === undefined || JSON.stringify(found) === JSON.stringify(property.default) ? undefined : found;
  };
  const set = (given) => write(given === undefined ? (property.default ?? null) : given);
  return { name, element, input, value, set };
}

/** A property without references and without the null that it may also be. */
function resolved(property, definitions) {
  const followed = (one) => (one.$ref ? definitions[one.$ref.split("/").at(-1)] : one);
  const choices = (property.anyOf ?? property.allOf ?? [property]).map(followed);
  const some = choices.filter((one) => one.type !== "null");
  return { spec: some.length === 1 ? some[0] : {}, optional: some.length < choices.length };
}

function choice(spec, standard, optional) {
  const values = [...(optional ? [null] : []), ...(spec.enum ?? [spec.const])];
  const input = h(
    "select",
    {},
    values.map((value) => h("option", { value: JSON.stringify(value) }, value === null ? "none" : String(value))),
  );
  input.value = JSON.stringify(standard);
  const write = (value) => (input.value = JSON.stringify(value));
  return { input, write, read: () => (input.value === "" ? undefined : JSON.parse(input.value)) };
}

function number(spec, standard, optional) {
  const whole = spec.type === "integer";
  const input = h("input", {
    type: "number",
    value: standard,
    step: whole ? 1 : stepOf(standard ?? spec.maximum),
    min: spec.minimum ?? (whole && "exclusiveMinimum" in spec ? spec.exclusiveMinimum + 1 : spec.exclusiveMinimum),
    max: spec.maximum ?? (whole && "exclusiveMaximum" in spec ? spec.exclusiveMaximum - 1 : spec.exclusiveMaximum),
    placeholder: optional ? "auto" : null,
  });
  const read = () => (input.value.trim() === "" ? (optional ? null : undefined) : Number(input.value));
  return { input, read, write: (value) => (input.value = value ?? "") };
}

function flag(spec, standard) {
  const input = h("input", { type: "checkbox", checked: standard === true });
  return { input, read: () => input.checked, write: (value) => (input.checked = value === true) };
}

function text(spec, standard, optional) {
  const input = h("input", { type: "text", value: standard, maxlength: spec.maxLength });
  const read = () => (input.value === "" && optional ? null : input.value);
  return { input, read, write: (value) => (input.value = value ?? "") };
}

/** Anything else, such as a list, is written as JSON, a list also without its brackets; what is neither goes to the server as
 * text, which says what is wrong. */
function json(spec, standard, optional) {
  const value = standard === null ? null : JSON.stringify(standard);
  const input = h("input", { type: "text", value, spellcheck: "false", placeholder: optional ? "auto, or a, b, c" : "a, b, c" });
  const read = () => {
    if (input.value.trim() === "") return optional ? null : undefined;
    const whole = parsed(input.value);
    const found = whole === undefined && input.value.includes(",") ? parsed(`[${input.value}]`) : whole;
    return found === undefined ? input.value : found;
  };
  const write = (given) => (input.value = given === null || typeof given === "string" ? (given ?? "") : JSON.stringify(given));
  return { input, read, write };
}

/** What a text says as JSON; undefined where it is none. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const MAKERS = { number, integer: number, boolean: flag, string: text };

/** How far a number goes with one press of an arrow key: half of its power of ten. */
const stepOf = (value) => (value ? 10 ** Math.floor(Math.log10(Math.abs(value))) / 2 : 0.1);

const LIMITS = [
  ["minimum", "at least"],
  ["exclusiveMinimum", "above"],
  ["maximum", "at most"],
  ["exclusiveMaximum", "below"],
];

/** What is said of an option, and the range of a number in words; null where there is neither. */
function hint(property, spec) {
  const range = LIMITS.filter(([name]) => name in spec).map(([name, said]) => `${said} ${spec[name]}`);
  return [property.description ?? spec.description, range.join(", ")].filter(Boolean).join("\n") || null;
}
