// What interventions and readouts are called on the pages: they come with the server's own names.

import { percent, seconds, short } from "./dom.js";

/** first_layer: "first layer". */
export const words = (name) => name.replaceAll("_", " ");

const PUBLISHED = Object.freeze({
  ...{ vista: "VISTA", only: "ONLY", opera: "OPERA", dola: "DoLa" },
  ...{ vcd: "VCD", icd: "ICD", pai: "PAI", m3id: "M3ID", agla: "AGLA" },
});

/** see: "See"; a published method as its paper writes it. */
export const title = (name) => PUBLISHED[name] ?? name.charAt(0).toUpperCase() + words(name.slice(1));

/** A group, such as SAGE, or a kind, such as VCD: both are abbreviations. */
export const acronym = (name) => words(name).toUpperCase();

/** An intervention by its path, and by its kind where others share the path. */
export const labelOf = (path, kind) => (kind ? acronym(kind) : title(path.at(-1)));

const GROUPS = { none: "plain", sage: "SAGE", "steer:other": "steered" };

/** A group of the summary: "steer:text+contrast:vcd" is "toward text + VCD". */
export const groupOf = (name) =>
  name
    .split("+")
    .map((one) => {
      const [head, kind] = one.split(":");
      return GROUPS[one] ?? (head === "steer" ? `toward ${kind}` : title(kind ?? head));
    })
    .join(" + ");

const MEASURES = {
  focus_share: ["focus share", percent],
  kl: ["KL", short],
  first_token: ["first token", seconds],
  total: ["total time", seconds],
  completion_tokens: ["answer tokens", short],
};

/** What a number of an answer is called, and how it is written. */
export const measure = (name) => MEASURES[name] ?? [words(name), short];
