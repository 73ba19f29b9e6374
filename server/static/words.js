// The words of an answer: what their maps are, and which differ from those of another answer.

import { meanMap } from "./heat.js";
import { diffArrays } from "./vendor/jsdiff.js";

const WORD = /\S+/g;

const byImage = (entries) =>
  Object.fromEntries(
    [...Map.groupBy(entries, (entry) => entry.image)].map(([image, some]) => [
      image,
      meanMap(some.map(({ map }) => map)),
    ]),
  );

/** Words of `text` with the maps of their tokens, found in the text in order:
 * [{text, maps: {image: map}, tokens: [{text, maps}]}]. */
export function wordsOf(text, tam) {
  const tokens = [...Map.groupBy(tam, (entry) => entry.position).values()];
  const places = [];
  let cursor = 0;
  for (const entries of tokens) {
    const piece = entries[0].token.trim();
    const at = piece ? text.indexOf(piece, cursor) : -1;
    if (at < 0) continue; // a token without visible text, such as the end of the answer
    places.push({ from: at, to: at + piece.length, text: piece, entries });
    cursor = at + piece.length;
  }
  return [...text.matchAll(WORD)].map((match) => {
    const [from, to] = [match.index, match.index + match[0].length];
    const inside = places.filter((place) => place.from < to && place.to > from);
    return {
      text: match[0],
      maps: byImage(inside.flatMap(({ entries }) => entries)),
      tokens: inside
        .filter((place) => place.from >= from) // one that reaches over two words is the first one's
        .map((place) => ({ text: place.text, maps: byImage(place.entries) })),
    };
  });
}

/** For each word of `text`, whether it is not in `reference` at that place. */
export function differing(reference, text) {
  const parts = diffArrays(reference.match(WORD) ?? [], text.match(WORD) ?? []);
  return parts.filter(({ removed }) => !removed).flatMap(({ value, added }) => value.map(() => Boolean(added)));
}
