// Web storage, which a browser may not allow: nothing is read then, and what is written is gone with the page.

/** What `window[kind]` holds under a name; null for nothing. */
export function read(kind, name) {
  try {
    return window[kind].getItem(name);
  } catch {
    return null;
  }
}

/** Store a text under a name; null removes it. */
export function write(kind, name, text) {
  try {
    if (text === null) window[kind].removeItem(name);
    else window[kind].setItem(name, text);
  } catch {
    // no room, or none allowed
  }
}
