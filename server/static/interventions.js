// The interventions of the server's catalogue as a form, and what is chosen in it as fields of a request.

import { h } from "./dom.js";
import { field } from "./field.js";
import { acronym, labelOf, title } from "./names.js";

/** The ids of all elements begin so: an intervention may be called as any other part of the page. */
const PREFIX = "asked";
const idOf = (...names) => [PREFIX, ...names].join("-");

/** Sections with a row for each place of a request where something may be asked for; `without` are fields that are drawn by
 * hand. A place has one intervention, that is switched on or off, or several kinds, of which one is chosen. */
export class Interventions {
  constructor(box, catalogue, without, lacking = { names: [], engine: "" }) {
    const shown = catalogue.filter(({ path, schema }) => schema && !without.includes(path[0]));
    this.places = grouped(shown, (item) => item.path.join(".")).map((items) =>
      items[0].kind ? new Kinds(items) : new Switch(items[0]),
    );
    const heads = grouped(this.places, ({ path }) => path[0]);
    box.replaceChildren(
      ...heads.map((places) =>
        h(
          "section",
          {},
          places[0].path.length > 1 && h("h2", {}, acronym(places[0].path[0])),
          places.map((place) => place.element),
        ),
      ),
      ...(lacking.names.length ? [lackingOf(lacking)] : []),
    );
    for (const place of this.places) place.element.addEventListener("change", () => this.#settle(place));
  }

  /** The fields of a request. Where a member of a group is on, each of its members is said to be on or off. */
  fields() {
    const heads = new Set(this.places.filter(({ chosen }) => chosen).map(({ path }) => path[0]));
    const found = {};
    for (const place of this.places.filter(({ path }) => heads.has(path[0]))) {
      const group = place.path.slice(0, -1).reduce((at, name) => (at[name] ??= {}), found);
      group[place.path.at(-1)] = place.value();
    }
    return found;
  }

  /** Choose what fields of a request say, and nothing else. */
  set(fields) {
    for (const place of this.places) {
      const given = place.path.reduce((at, name) => at?.[name], fields);
      place.choose(given);
      place.show();
      for (const one of place.fields) one.set(given?.[one.name]);
    }
  }

  /** What may be asked for one by one: [{name, fields}], with the options that the form has. */
  each() {
    const now = this.fields();
    const single = (item) => {
      const given = item.path.reduce((at, name) => at?.[name], now);
      const value = item.kind ? (given?.kind === item.kind ? given : { kind: item.kind }) : given || true;
      const others = this.places.filter(({ path }) => path[0] === item.path[0] && path.length > 1);
      const fields = {};
      for (const { path } of others.length ? others : [item]) {
        const group = path.slice(0, -1).reduce((at, name) => (at[name] ??= {}), fields);
        group[path.at(-1)] = path.join() === item.path.join() ? value : false;
      }
      return { name: labelOf(item.path, item.kind), fields, vectors: item.vectors };
    };
    return this.places.flatMap(({ items }) => items.map(single));
  }

  /** What is on, in words. */
  names() {
    return this.places.filter(({ chosen }) => chosen).map(({ chosen }) => labelOf(chosen.path, chosen.kind));
  }

  /** The element that is closest to a field of a request, such as sage.see.alpha; null where there is none. */
  find(param) {
    const names = param.split(".");
    for (; names.length; names.pop()) {
      const found = document.getElementById(idOf(...names));
      if (found) return found;
    }
    return null;
  }

  /** Of those with a twin, which contrast an answer with another, a request may have one: the one that was chosen last. */
  #settle(changed) {
    for (const place of this.places) {
      if (place !== changed && place.chosen?.twin && changed.chosen?.twin) place.clear();
      place.show();
    }
  }
}

/** A row of the form: what is chosen, and its options. */
class Place {
  constructor(items, control) {
    this.items = items;
    this.path = items[0].path;
    this.options = h("div", { class: "options", hidden: true });
    this.element = h("div", { class: "stage" }, control, this.options);
    this.fieldsOf = null;
    this.fields = [];
  }

  /** Show the options of what is chosen, and keep them while it stays so. */
  show() {
    const { chosen } = this;
    if (chosen === this.fieldsOf) return;
    this.fieldsOf = chosen;
    this.fields = optionsOf(chosen).map(([name, property]) =>
      field(idOf(...this.path, name), name, property, chosen.schema.$defs),
    );
    this.options.replaceChildren(...this.fields.map(({ element }) => element));
    this.options.hidden = this.fields.length === 0;
  }

  /** What is given beside the defaults. */
  given() {
    const found = this.fields.map((one) => [one.name, one.value()]).filter(([, value]) => value !== undefined);
    return Object.fromEntries(found);
  }
}

class Switch extends Place {
  constructor(item) {
    const input = h("input", { type: "checkbox", id: idOf(...item.path) });
    const said = [h("span", {}, labelOf(item.path)), h("small", {}, noteOf(item))];
    super([item], h("label", { class: "switch" }, input, said));
    Object.assign(this, { item, input });
    this.element.title = aboutOf(item);
  }

  choose(given) {
    this.input.checked = Boolean(given);
  }

  get chosen() {
    return this.input.checked ? this.item : null;
  }

  clear() {
    this.input.checked = false;
  }

  value() {
    if (!this.chosen) return false;
    const given = this.given();
    return Object.keys(given).length ? given : true;
  }
}

class Kinds extends Place {
  constructor(items) {
    const id = idOf(...items[0].path);
    const kinds = items.map(({ kind }) => h("option", { value: kind }, acronym(kind)));
    const input = h("select", { id }, h("option", { value: "" }, "none"), kinds);
    const note = h("small", { class: "soft" });
    super(items, h("label", { class: "pick", for: id }, h("span", {}, title(items[0].path.at(-1))), input, note));
    Object.assign(this, { input, note });
  }

  choose(given) {
    const kind = given?.kind ?? "";
    this.input.value = this.items.some((item) => item.kind === kind) ? kind : "";
  }

  get chosen() {
    return this.items.find(({ kind }) => kind === this.input.value) ?? null;
  }

  clear() {
    this.input.value = "";
  }

  show() {
    super.show();
    this.note.textContent = this.chosen ? noteOf(this.chosen) : "";
    this.element.title = aboutOf(this.chosen);
  }

  value() {
    return this.chosen ? { kind: this.chosen.kind, ...this.given() } : false;
  }
}

/** What this version has, but not the server's engine: greyed out. */
const lackingOf = ({ names, engine }) =>
  h(
    "section",
    { class: "lacking" },
    h("h2", {}, `Not supported by ${engine}`),
    names.map((name) =>
      h(
        "div",
        { class: "stage" },
        h("label", { class: "switch off" }, h("input", { type: "checkbox", disabled: true }), h("span", {}, lackingLabel(name))),
      ),
    ),
  );

/** "sage.see": "SAGE: See"; "dola": "DoLa". */
const lackingLabel = (name) => {
  const [head, ...rest] = name.split(".");
  return rest.length ? `${acronym(head)}: ${title(rest.join(" "))}` : title(head);
};

/** The options of an intervention with their schemas, but for its kind, which is chosen before them. */
export const optionsOf = (item) =>
  Object.entries(item?.schema?.properties ?? {}).filter(([name]) => !(item.kind && name === "kind"));

/** All that the server says of an intervention and of its options, which it names. */
const aboutOf = (item) =>
  (item?.schema.description ?? "")
    .replace(/(\S)\n(?=\S)/g, "$1 ") // its paragraphs are lines of a source
    .replace(/ ?Raises RequestError [^.]*\./, "") // which tells callers of the library
    .replaceAll("`", "")
    .trim();

/** What an intervention does, in one line: the beginning of what the server says of it. */
const noteOf = ({ schema }) => (schema.description ?? "").split(/[.;:]\s|[.;:]$/)[0].replaceAll("`", "");

function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return [...groups.values()];
}
