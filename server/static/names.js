// What interventions and readouts are called on the pages: they come with the server's own names.

/** first_layer: "first layer". */
export const words = (name) => name.replaceAll("_", " ");

/** see: "See". */
export const title = (name) => name.charAt(0).toUpperCase() + words(name.slice(1));

/** A group, such as SAGE, or a kind, such as VCD: both are abbreviations. */
export const acronym = (name) => words(name).toUpperCase();

/** An intervention by its path, and by its kind where others share the path. */
export const labelOf = (path, kind) => (kind ? acronym(kind) : title(path.at(-1)));
