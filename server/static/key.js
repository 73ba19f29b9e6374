// The form that asks for an API key, on both pages.

import { storeKey, storedKey } from "./api.js";
import { byId } from "./dom.js";

/** Whether the server refused for want of a key, or of one that may do this. */
export const wantsKey = (error) => error.status === 401 || error.code === "missing_role";

/** Show the form; `error` is the server's refusal. */
export function askForKey(error) {
  byId("key-error").textContent = storedKey() ? error.message : "";
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
}

/** Call `connect` whenever a key is given. */
export function onKey(connect) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey(byId("key").value.trim());
    byId("key-form").hidden = true;
    connect();
  });
}
