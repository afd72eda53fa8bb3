// Which view is shown, and the heartbeat that keeps it up to date.

import { ask, Lost } from "./asking.js";
import { h, mark, say } from "./dom.js";
import { comparison } from "./comparison.js";
import { federation } from "./federation.js";
import { list } from "./list.js";
import { run } from "./run.js";

const BEAT = 1500; // milliseconds between two questions
const HIDDEN = 15000; // the same while the page is hidden

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;
let turn = 0; // of the view that is shown: answers for an earlier one are not for us any more
let timer = 0;
let shown = "";

/** `#/run/ID?x=y` as its parts. */
function route() {
  const [path, fields] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name, rest: rest.join("/"), fields: new URLSearchParams(fields) };
}

function open() {
  const { name, rest, fields } = route();
  if (view?.stays?.(name, rest, fields)) return;
  view?.close?.();
  turn += 1;
  clearTimeout(timer);
  main.replaceChildren();
  const first = shown === "";
  shown = `${name}/${rest}`;
  view = name === "run" ? run(rest) : name === "compare" ? comparison(rest) : name === "federation" ? federation() : list(fields);
  main.append(view.node);
  document.title = view.title ? `${view.title} · fedprompt` : "fedprompt runs";
  if (!first) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  beat(turn);
}

async function beat(mine) {
  clearTimeout(timer);
  try {
    await view.update(() => mine === turn);
    if (mine !== turn) return;
    say(connection, "Live");
    mark(connection, "data-state", "live");
    document.body.classList.remove("stale");
  } catch (error) {
    if (mine !== turn) return;
    const lost = error instanceof Lost;
    if (!lost) console.error(error);
    say(connection, lost ? "Lost connection. Trying again…" : `Something went wrong: ${error.message}`);
    mark(connection, "data-state", "lost");
    document.body.classList.add("stale");
  }
  if (mine === turn) timer = setTimeout(() => beat(mine), document.hidden ? HIDDEN : BEAT);
}

addEventListener("hashchange", open);
document.addEventListener("visibilitychange", () => document.hidden || beat(turn));
document.getElementById("skip").addEventListener("click", () => main.focus());
main.append(h("p", { class: "notice" }, "Reading runs…"));

/** With a federation, its page comes first, and a link leads back to it. */
async function start() {
  try {
    const { federation: known } = await ask("about");
    document.getElementById("federation").hidden = !known;
    if (known && !location.hash) history.replaceState(null, "", "#/federation");
  } catch (error) {
    console.error(error); // the heartbeat tells that the connection is lost
  }
  open();
}
start();
