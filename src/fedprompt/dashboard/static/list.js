// All runs in a table: filtered, sorted, ticked.

import { ask } from "./asking.js";
import { arrange, h, mark, say } from "./dom.js";
import { ago, moment, NONE, percent, plural } from "./format.js";
import { badge, progress } from "./parts.js";
import { selection } from "./selection.js";

const SHOWN = 200; // rows at first
const MOST = 40; // runs of a comparison
const STATES = ["running", "finished", "stopped", "damaged"];
const order = (text) => (text ?? "").toLowerCase();
const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
const SORTS = {
  activity: { title: "Activity", by: (a, b) => (b.status === "running") - (a.status === "running") || (a.status === "running" ? 0 : b.changed - a.changed) },
  name: { title: "Run", by: byName },
  status: { title: "Status", by: (a, b) => STATES.indexOf(a.status) - STATES.indexOf(b.status) },
  method: { title: "Method", by: (a, b) => order(a.method).localeCompare(order(b.method)) },
  seed: { title: "Seed", by: (a, b) => (a.seed ?? Infinity) - (b.seed ?? Infinity) },
  data: { title: "Data", by: (a, b) => order(a.data).localeCompare(order(b.data)) },
  rounds: { title: "Rounds", by: (a, b) => b.rounds / (b.of || 1) - a.rounds / (a.of || 1) },
  average: { title: "Average (final)", by: (a, b) => (b.average ?? -1) - (a.average ?? -1) },
  worst: { title: "Worst Local (final)", by: (a, b) => (b.worst ?? -1) - (a.worst ?? -1) },
  changed: { title: "Changed", by: (a, b) => (b.changed ?? 0) - (a.changed ?? 0) },
};
const COLUMNS = ["name", "status", "method", "seed", "data", "rounds", "average", "worst", "changed"];

// what was heard outlives the view, so that coming back shows it at once
const known = { session: "", stamp: 0, runs: new Map(), now: 0, heard: false, folders: [], waiting: 0, truncated: false };

function hear(answer) {
  if (answer.session !== known.session) known.runs.clear();
  for (const entry of answer.changed) known.runs.set(entry.id, entry);
  const present = new Set(answer.present);
  for (const id of [...known.runs.keys()]) if (!present.has(id)) known.runs.delete(id);
  const { session, stamp, now, folders, waiting, truncated } = answer;
  Object.assign(known, { session, stamp, now, folders, waiting, truncated, heard: true });
}

export function list(fields) {
  const state = { q: "", status: "", method: "", data: "", sort: "activity", down: false };
  let most = SHOWN;
  const rows = new Map();
  let last = null; // ticked last, where a range begins

  const search = h("input", { type: "search", id: "filter", placeholder: "Name, method, folder…", autocomplete: "off", spellcheck: "false" });
  const choices = Object.fromEntries(["status", "method", "data"].map((name) => [name, h("select", { id: `filter-${name}` })]));
  const sorts = h("select", { id: "sort" }, Object.entries(SORTS).map(([key, { title }]) => h("option", { value: key }, title)));
  const clear = h("button", { type: "button", class: "quiet" }, "Clear filters");
  const count = h("p", { class: "count", role: "status", "aria-live": "polite" });
  const heads = Object.fromEntries(
    COLUMNS.map((key) => [key, h("th", { scope: "col", class: `col-${key}` }, h("button", { type: "button" }, SORTS[key].title, h("span", { class: "arrow", "aria-hidden": "true" })))]),
  );
  const all = h("input", { type: "checkbox", "aria-label": "Select all runs shown" });
  const body = h("tbody", {});
  const table = h("table", { class: "runs" }, h("caption", { class: "unseen" }, "Runs"), h("thead", {}, h("tr", {}, h("th", { class: "col-tick" }, all), Object.values(heads))), body);
  const more = h("button", { type: "button", class: "more", hidden: true });
  const empty = h("p", { class: "notice" }, "Reading runs…");
  const chosen = h("span", {});
  const compare = h("a", { class: "button", href: "#/compare/" }, "Compare");
  const none = h("button", { type: "button", class: "quiet" }, "Clear");
  const tray = h("div", { class: "tray", role: "region", "aria-label": "Selected runs", hidden: true }, chosen, compare, none);
  const labelled = (title, control, kind = "") => h("div", { class: `control ${kind}` }, h("label", { for: control.id }, title), control);
  const node = h(
    "div",
    {},
    h("h1", { class: "unseen" }, "Runs"),
    h(
      "form",
      { class: "filters", role: "search", "aria-label": "Filter runs" },
      labelled("Filter", search, "wide"),
      labelled("Status", choices.status),
      labelled("Method", choices.method),
      labelled("Data", choices.data),
      labelled("Sort by", sorts, "sorter"),
      clear,
    ),
    count,
    empty,
    table,
    more,
    tray,
  );

  function adopt(wanted) {
    for (const key of ["q", "status", "method", "data"]) state[key] = wanted.get(key) ?? "";
    const sort = wanted.get("sort") ?? "activity";
    state.down = sort.startsWith("-");
    state.sort = Object.hasOwn(SORTS, sort.replace(/^-/, "")) ? sort.replace(/^-/, "") : "activity";
    search.value = state.q;
    sorts.value = state.sort;
  }

  function remember() {
    const wanted = new URLSearchParams();
    for (const key of ["q", "status", "method", "data"]) if (state[key]) wanted.set(key, state[key]);
    if (state.sort !== "activity" || state.down) wanted.set("sort", `${state.down ? "-" : ""}${state.sort}`);
    const text = wanted.toString();
    history.replaceState(null, "", text ? `#/?${text}` : "#/");
  }

  const passes = (entry) =>
    (!state.status || entry.status === state.status) &&
    (!state.method || entry.method === state.method) &&
    (!state.data || entry.data === state.data) &&
    order(state.q)
      .split(/\s+/)
      .every((word) => `${entry.name} ${entry.folder} ${entry.method} ${entry.data} ${entry.backbone} seed${entry.seed}`.toLowerCase().includes(word));

  function filtered() {
    const found = [...known.runs.values()].filter(passes);
    const { by } = SORTS[state.sort];
    found.sort((a, b) => (state.down ? -1 : 1) * by(a, b) || byName(a, b) || (a.id < b.id ? -1 : 1));
    return found;
  }

  function offer(select, values, title, wanted) {
    const options = ["", ...new Set([...values, ...(wanted ? [wanted] : [])])];
    if (select.dataset.values !== JSON.stringify(options)) {
      select.dataset.values = JSON.stringify(options);
      select.replaceChildren(...options.map((value) => h("option", { value }, value || title)));
    }
    select.value = wanted;
  }

  function draw() {
    const entries = [...known.runs.values()];
    const of = (key) => [...new Set(entries.map((entry) => entry[key]).filter(Boolean))].sort();
    offer(choices.status, STATES, "All", state.status);
    offer(choices.method, of("method"), "All", state.method);
    offer(choices.data, of("data"), "All", state.data);
    const found = filtered();
    const shown = found.slice(0, most);
    for (const id of rows.keys()) if (!known.runs.has(id)) rows.delete(id);
    for (const entry of shown) {
      if (!rows.has(entry.id)) rows.set(entry.id, row(tick));
      rows.get(entry.id).update(entry, known.now);
    }
    arrange(body, shown.map((entry) => rows.get(entry.id).node));
    table.hidden = !shown.length;
    more.hidden = found.length <= most;
    say(more, `Show more (${found.length - shown.length} left)`);
    const running = entries.filter((entry) => entry.status === "running").length;
    const parts = [found.length === entries.length ? plural(entries.length, "run") : `${found.length} of ${plural(entries.length, "run")}`, running ? `${running} running` : ""];
    if (known.waiting) parts.push(`reading ${known.waiting} more`);
    if (known.truncated) parts.push("there are more folders than are looked into");
    say(count, known.heard ? parts.filter(Boolean).join(" · ") : "");
    empty.hidden = Boolean(shown.length);
    say(empty, !known.heard ? "Reading runs…" : entries.length ? "No run passes these filters." : known.waiting ? "Reading runs…" : `No runs in ${known.folders.join(", ")} yet. They appear here when they start.`);
    clear.hidden = !(state.q || state.status || state.method || state.data);
    for (const key of COLUMNS) mark(heads[key], "aria-sort", state.sort === key ? (state.down ? "descending" : "ascending") : null);
    tray_();
  }

  function tray_() {
    const ids = selection.ids().filter((id) => known.runs.has(id));
    tray.hidden = !ids.length;
    document.body.classList.toggle("with-tray", Boolean(ids.length));
    say(chosen, ids.length > MOST ? `${ids.length} selected, at most ${MOST} can be compared` : `${plural(ids.length, "run")} selected`);
    mark(compare, "href", `#/compare/${ids.slice(0, MOST).join(",")}`);
    const shown = [...body.children].map((line) => line.dataset.id);
    all.checked = shown.length > 0 && shown.every(selection.has);
    all.indeterminate = !all.checked && shown.some(selection.has);
  }

  function tick(id, on, range) {
    const shown = [...body.children].map((line) => line.dataset.id);
    const [from, to] = [shown.indexOf(last), shown.indexOf(id)].sort((a, b) => a - b);
    for (const each of range && from >= 0 ? shown.slice(from, to + 1) : [id]) selection.set(each, on);
    last = id;
    for (const each of rows.values()) each.tick();
    tray_();
  }

  function changed() {
    remember();
    draw();
  }

  node.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", () => ((state.q = search.value), changed()));
  for (const [name, select] of Object.entries(choices)) select.addEventListener("change", () => ((state[name] = select.value), changed()));
  sorts.addEventListener("change", () => ((state.sort = sorts.value), (state.down = false), changed()));
  clear.addEventListener("click", () => {
    Object.assign(state, { q: "", status: "", method: "", data: "" });
    search.value = "";
    search.focus();
    changed();
  });
  for (const [key, head] of Object.entries(heads))
    head.firstChild.addEventListener("click", () => {
      state.down = state.sort === key && !state.down;
      state.sort = sorts.value = key;
      changed();
    });
  all.addEventListener("change", () => {
    for (const line of body.children) selection.set(line.dataset.id, all.checked);
    for (const each of rows.values()) each.tick();
    tray_();
  });
  more.addEventListener("click", () => ((most += SHOWN), draw()));
  none.addEventListener("click", () => {
    selection.clear();
    for (const each of rows.values()) each.tick();
    tray_();
    search.focus();
  });

  adopt(fields);
  if (known.heard) draw();
  return {
    node,
    stays(name, rest, wanted) {
      if (name !== "") return false;
      adopt(wanted);
      draw();
      return true;
    },
    async update(current) {
      const answer = await ask("runs", { after: known.stamp, session: known.session });
      hear(answer);
      if (current()) draw();
    },
    close: () => document.body.classList.remove("with-tray"),
  };
}

/** A line of the table; a card where there is little room. */
function row(tick) {
  const box = h("input", { type: "checkbox" });
  const link = h("a", {});
  const folder = h("span", { class: "folder" });
  const reason = h("span", { class: "reason" });
  const state = badge();
  const done = progress();
  const cells = Object.fromEntries(["method", "seed", "data", "average", "worst", "changed"].map((key) => [key, h("td", { class: `col-${key}`, "data-label": SORTS[key].title })]));
  const node = h(
    "tr",
    {},
    h("td", { class: "col-tick" }, h("label", { class: "hit" }, box)),
    h("th", { scope: "row", class: "col-name" }, link, folder, reason),
    h("td", { class: "col-status" }, state.node),
    cells.method,
    cells.seed,
    cells.data,
    h("td", { class: "col-rounds", "data-label": "Rounds" }, done.node),
    cells.average,
    cells.worst,
    cells.changed,
  );
  let id = "";
  box.addEventListener("click", (event) => tick(id, box.checked, event.shiftKey));
  const check = () => {
    box.checked = selection.has(id);
    mark(node, "data-ticked", box.checked ? "yes" : null);
  };
  return {
    node,
    tick: check,
    update(entry, now) {
      id = node.dataset.id = entry.id;
      mark(box, "aria-label", `Select ${entry.name}`);
      say(link, entry.name);
      mark(link, "href", `#/run/${entry.id}`);
      say(folder, entry.folder);
      say(reason, entry.reason ?? "");
      state.update(entry);
      done.update(entry);
      mark(node, "data-status", entry.status);
      say(cells.method, entry.method ?? NONE);
      say(cells.seed, entry.seed ?? NONE);
      say(cells.data, entry.data ?? NONE);
      const images = entry.images === "validation" && entry.average !== null ? ", validation" : "";
      say(cells.average, percent(entry.average) + images);
      say(cells.worst, percent(entry.worst) + images);
      say(cells.changed, ago(entry.changed, now));
      mark(cells.changed, "title", moment(entry.changed));
      check();
    },
  };
}
