// Whether the server is there and its model is loaded, told in the bar at the top of each page.

import { byId, h, percent, seconds } from "./dom.js";

const BUSY = 1000; // between two looks while it is not ready
const CALM = 5000; // and while it is

const tell = (kind, ...content) => {
  byId("model").className = `model ${kind}`;
  byId("model").replaceChildren(...content);
};

export const tellModel = (model) =>
  tell(
    "on",
    h("b", {}, model.id),
    h("span", { class: "wide-only" }, ` ${model.layers} layers, ${model.quantization ?? model.dtype} on ${model.device}`),
  );

export const tellProblem = (message) => tell("off", message);

/** What is told of a server that does not answer requests yet, or no more. */
function tellState({ status, progress }) {
  if (status === "draining") return tell("off", "The server is shutting down.");
  if (status !== "loading") return tell("off", "The model is not available.");
  const share = progress?.share ?? null;
  const lower = (stage) => stage.charAt(0).toLowerCase() + stage.slice(1);
  const said = progress ? [lower(progress.stage), ...(share === null ? [] : [percent(share)]), seconds(progress.seconds)] : [];
  tell(
    "off",
    h("progress", { max: 1, value: share, "aria-label": "Loading of the model" }),
    " Loading the model",
    h("span", { class: "wide-only" }, said.length ? `: ${said.join(", ")}` : ""),
  );
}

/** Call `connect()` when the server is ready, and again whenever it was away; tells of it meanwhile. */
export function follow(connect) {
  let ready = false;
  let timer = null;
  const look = async () => {
    clearTimeout(timer);
    if (!document.hidden || !ready) {
      try {
        const response = await fetch("/ready", { cache: "no-store" });
        const said = await response.json();
        if (response.ok && !ready) connect();
        else if (!response.ok) tellState(said);
        ready = response.ok;
      } catch {
        ready = false;
        tellProblem("The server is gone. Looking for it…");
      }
    }
    timer = setTimeout(look, ready ? CALM : BUSY);
  };
  document.addEventListener("visibilitychange", look);
  document.addEventListener("helmsight:gone", () => {
    if (ready) look();
  });
  look();
}
