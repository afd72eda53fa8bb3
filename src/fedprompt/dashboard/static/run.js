// One run, while it trains and afterwards.

import { ask, Refused } from "./asking.js";
import { curves } from "./charts.js";
import { beside } from "./classes.js";
import { h, mark, say, whenChanged } from "./dom.js";
import { ago, bytes, duration, moment, NONE, number, percent, plural } from "./format.js";
import { heatmap } from "./heatmap.js";
import { badge, bars, progress, section } from "./parts.js";
import { selection } from "./selection.js";

const TILES = ["Round", "Test Average", "Test Worst Local", "Average", "Mean of last rounds", "Worst Local", "Best Average", "Training loss", "Sent", "Time", "Left", "Epsilon"];

export function run(id) {
  const known = { version: "", after: -1, curves: { loss: [], accuracy: [], epsilon: [] } };
  let evaluated = null;
  let settled = null; // what the settings were read of
  const title = h("h1", {}, "Run");
  const about = h("p", { class: "about" });
  const state = badge();
  const done = progress();
  const notice = h("p", { class: "notice bad", role: "alert", hidden: true });
  const waiting = h("p", { class: "notice" }, "Reading the run…");
  const add = h("button", { type: "button" });
  const tiles = Object.fromEntries(TILES.map((name) => [name, tile(name)]));
  const charts = {
    accuracy: curves({ title: "Accuracy by round", x: "Round", readX: String, readY: percent, tickY: (value) => `${+(100 * value).toFixed(1)} %`, bounds: [0, 1] }),
    loss: curves({ title: "Training loss", x: "Round", readX: String, readY: number, tickY: (value) => String(+value.toPrecision(3)) }),
    seconds: curves({ title: "Seconds by round", x: "Round", readX: String, readY: duration, tickY: (value) => String(+value.toPrecision(3)) }),
    epsilon: curves({ title: "Privacy spent (epsilon)", x: "Round", readX: String, readY: (value) => number(value, 3), tickY: (value) => String(+value.toPrecision(3)) }),
  };
  const heat = heatmap("Accuracy by client and round");
  const heatNote = h("p", { class: "note" });
  const thinned = h("p", { class: "note" });
  const holders = Object.fromEntries(["domains", "classes", "phases", "refused", "events", "last", "settings"].map((name) => [name, h("div", {})]));
  const panel = {
    domains: section("Accuracy by domain", holders.domains),
    classes: section("Classification metrics", holders.classes),
    phases: section("Time by phase", holders.phases),
    refused: section("Refused updates", holders.refused),
    loss: h("div", { class: "panel" }, charts.loss.node),
    privacy: h("div", { class: "panel", hidden: true }, charts.epsilon.node, h("p", { class: "note" })),
    events: section("Events", holders.events),
    last: section("Last rounds", holders.last),
  };
  const settings = h("details", { class: "panel settings" }, h("summary", {}, h("h2", {}, "Settings and versions")), holders.settings);
  const content = h(
    "div",
    {},
    h("div", { class: "tiles" }, Object.values(tiles).map(({ node }) => node)),
    h(
      "div",
      { class: "two" },
      h("div", {}, h("div", { class: "panel" }, charts.accuracy.node, thinned), h("div", { class: "panel" }, heat.node, heatNote), panel.domains, panel.refused, panel.events),
      h("div", {}, panel.loss, panel.privacy, panel.phases, h("div", { class: "panel" }, charts.seconds.node), panel.last),
    ),
    panel.classes,
    settings,
  );
  const node = h(
    "div",
    {},
    h("p", { class: "crumbs" }, h("a", { href: "#/" }, "← All runs")),
    h("div", { class: "heading" }, title, state.node, done.node, add),
    about,
    notice,
    waiting,
    content,
  );
  content.hidden = panel.classes.hidden = true;

  const drawn = {
    accuracy: whenChanged((points) =>
      charts.accuracy.update([
        { label: "Average", place: 0, dashed: "", points: points.map(([round, average]) => [round, average]) },
        { label: "Worst Local", place: 1, dashed: "6 4", points: points.map(([round, , worst]) => [round, worst]) },
      ]),
    ),
    loss: whenChanged((points) => {
      charts.loss.update([{ label: "Loss", place: 2, dashed: "", points: points.map(([round, loss]) => [round, loss]) }]);
      charts.seconds.update([{ label: "Seconds", place: 3, dashed: "", points: points.filter(([round]) => round > 0).map(([round, , seconds]) => [round, seconds]) }]);
    }),
    epsilon: whenChanged((points) => charts.epsilon.update([{ label: "Epsilon", place: 5, dashed: "", points }])),
    domains: whenChanged((domains) => holders.domains.replaceChildren(byDomain(domains))),
    phases: whenChanged((phases) => holders.phases.replaceChildren(byPhase(phases))),
    refused: whenChanged(({ refused, absent }) => holders.refused.replaceChildren(byRule(refused), absentNote(absent))),
    events: whenChanged((events) => holders.events.replaceChildren(eventList(events))),
    last: whenChanged((rows) => holders.last.replaceChildren(lastRounds(rows))),
    clients: whenChanged((clients) => {
      heat.update(clients);
      say(heatNote, aboutClients(clients));
    }),
    classes: whenChanged((found) => {
      panel.classes.hidden = !found.rows.length;
      holders.classes.replaceChildren(...beside(found));
    }),
    settings: whenChanged((found) => holders.settings.replaceChildren(...settingsOf(found))),
  };

  function hear(answer) {
    if (answer.version !== known.version) known.curves = { loss: [], accuracy: [], epsilon: [] };
    for (const [name, { behind, points }] of Object.entries(answer.curves))
      known.curves[name] = [...known.curves[name].filter(([round]) => round <= behind), ...points];
    known.version = answer.version;
    known.after = answer.figures.round;
  }

  function draw(answer) {
    const { entry, figures } = answer;
    say(title, entry.name);
    document.title = `${entry.name} · fedprompt`;
    state.update(entry);
    done.update(entry);
    const origin = [entry.method, entry.seed === null ? null : `seed ${entry.seed}`, entry.data, entry.backbone, entry.folder, `changed ${ago(entry.changed, answer.now)}`];
    say(about, origin.filter((part) => part !== null).join(" · "));
    mark(about, "title", moment(entry.changed));
    warn(entry.status === "damaged" ? `This run is damaged. ${entry.reason}` : "");
    content.hidden = entry.status === "damaged" && !known.curves.loss.length;
    content.classList.toggle("past", entry.status === "damaged");
    if (entry.status === "damaged") return;
    tiles.Round.update(`${figures.round} / ${entry.of}`, `${plural(figures.cohort, "client")} in the last`);
    const validated = answer.rounds_on === "validation"; // then final figures are those of the test, after the last round
    const when = `${entry.status === "finished" && !validated ? "final, " : ""}in round ${figures.evaluated}${validated ? ", validation images" : ""}`;
    for (const [place, name] of [[1, "Test Average"], [2, "Test Worst Local"]]) {
      tiles[name].node.hidden = !validated;
      tiles[name].update(percent(answer.tested?.[place]), answer.tested ? `final, of round ${answer.tested[0]}` : "test images are read at the end");
    }
    for (const chart of [charts.accuracy, heat]) chart.about(validated ? "on validation images" : "");
    say(panel.domains.firstChild, `Accuracy by domain${validated ? ", on validation images" : ""}`);
    tiles.Average.update(percent(figures.average), figures.evaluated === null ? "not evaluated yet" : when);
    tiles["Mean of last rounds"].update(percent(figures.mean), `Average, mean of last ${figures.mean_of}${validated ? ", validation images" : ""}`);
    tiles["Mean of last rounds"].node.hidden = figures.mean_of < 2;
    tiles["Worst Local"].update(percent(figures.worst), figures.evaluated === null ? "" : when);
    tiles["Best Average"].update(percent(figures.best), figures.best_round === null ? "" : `in round ${figures.best_round}${validated ? ", validation images" : ""}`);
    tiles["Training loss"].update(number(figures.loss), "mean of the last cohort");
    tiles.Sent.update(bytes(figures.bytes_up + figures.bytes_down), `${bytes(figures.bytes_up)} up, ${bytes(figures.bytes_down)} down`);
    tiles.Time.update(duration(figures.seconds), `${duration(figures.pace)} a round, of late`);
    tiles.Left.update(entry.left ? duration(entry.left) : NONE, entry.status === "running" ? "about, at this pace" : entry.status);
    tiles.Left.node.hidden = entry.status === "finished";
    tiles.Epsilon.update(figures.epsilon === null ? "∞" : number(figures.epsilon, 3), answer.privacy ? `delta ${answer.privacy.delta}, noise at the ${answer.privacy.noise_at}` : "");
    tiles.Epsilon.node.hidden = !figures.private;
    const [everyRound, everyEvaluation] = answer.every;
    say(thinned, everyEvaluation > 1 || everyRound > 1 ? `A long run: every ${Math.max(everyRound, everyEvaluation)}th point of the curves is shown.` : "");
    for (const name of ["accuracy", "loss", "epsilon"]) drawn[name](known.curves[name]);
    const silent = figures.round > 0 && known.curves.loss.every(([, loss]) => loss === null); // private clients do not tell
    panel.loss.hidden = tiles["Training loss"].node.hidden = silent;
    panel.privacy.hidden = !figures.private;
    if (answer.privacy) say(panel.privacy.lastChild, Object.entries(answer.privacy).filter(([, value]) => value !== null && typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", "));
    panel.domains.hidden = !Object.keys(answer.domains).length;
    drawn.domains(answer.domains);
    drawn.phases(answer.phases);
    drawn.refused({ refused: figures.refused, absent: figures.absent });
    drawn.events(answer.events);
    drawn.last(answer.last);
  }

  function warn(text) {
    notice.hidden = !text;
    say(notice, text);
  }

  function offer() {
    say(add, selection.has(id) ? "Selected for comparison ✓" : "Select for comparison");
    mark(add, "aria-pressed", String(selection.has(id)));
  }
  add.addEventListener("click", () => (selection.set(id, !selection.has(id)), offer()));
  offer();
  settings.addEventListener("toggle", () => settings.open && readSettings().catch(() => {}));

  async function readSettings() {
    const version = known.version.split("-").slice(0, 2).join("-");
    if (settled === version) return;
    drawn.settings(await ask("settings", { id }));
    settled = version;
  }

  return {
    node,
    title: "Run",
    async update(current) {
      try {
        const answer = await ask("run", { id, after: known.after, version: known.version });
        if (!current()) return;
        waiting.remove();
        hear(answer);
        draw(answer);
        const now = `${answer.version}/${answer.figures.evaluated}/${answer.entry.status === "finished"}`;
        if (answer.entry.status !== "damaged" && now !== evaluated) {
          const clients = await ask("clients", { id });
          if (!current()) return;
          drawn.clients(clients);
          if (answer.entry.status === "finished") drawn.classes(await ask("classes", { id }));
          if (!current()) return;
          if (clients.rounds.at(-1) === answer.figures.evaluated || answer.figures.evaluated === null) evaluated = now;
        }
        if (settings.open) await readSettings();
      } catch (error) {
        if (!(error instanceof Refused) || !current()) throw error;
        waiting.remove();
        warn(error.status === 404 ? "This run is gone: it was moved or deleted. The page shows it again if it comes back." : error.message);
        content.classList.add("past");
        content.hidden = !known.version;
        known.version = "";
        evaluated = null;
      }
    },
    close() {
      for (const chart of [...Object.values(charts), heat]) chart.close();
    },
  };
}

function tile(name) {
  const value = h("span", { class: "value" }, NONE);
  const more = h("span", { class: "more-text" });
  const node = h("div", { class: "tile" }, h("span", { class: "name" }, name), value, more);
  return { node, update: (text, about) => (say(value, text), say(more, about)) };
}

const byDomain = (domains) => bars(Object.entries(domains).map(([name, value]) => [name, value ?? 0, percent(value, 1)]));

function byPhase(phases) {
  const rows = Object.entries(phases).sort((a, b) => b[1] - a[1]);
  const total = rows.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!rows.length) return h("p", { class: "note" }, "Nothing was timed yet.");
  return bars(rows.map(([name, seconds]) => [name, total ? seconds / total : 0, `${duration(seconds)} · ${percent(total ? seconds / total : 0, 0)}`]));
}

function absentNote(absent) {
  return absent ? h("p", { class: "note" }, `Clients were picked and absent ${absent} times: no update came.`) : "";
}

function byRule(refused) {
  const rows = Object.entries(refused);
  if (!rows.length) return h("p", { class: "note" }, "The guard let every update in.");
  const most = Math.max(...rows.map(([, count]) => count));
  return bars(rows.map(([rule, count]) => [rule, count / most, String(count)]));
}

function eventList({ counts, latest }) {
  if (!latest.length) return h("p", { class: "note" }, "Nothing out of the ordinary happened.");
  const told = Object.entries(counts).map(([kind, count]) => `${kind} ${count}`).join(", ");
  return h(
    "div",
    {},
    h("p", { class: "note" }, `${told}. Newest first${latest.length >= 100 ? ", the last 100" : ""}:`),
    h(
      "ol",
      { class: "events", tabindex: 0, "aria-label": "Events, newest first" },
      latest.map(({ round, client, kind, detail }) => h("li", {}, h("b", {}, `Round ${round}`), client === null || client < 0 ? "" : ` · client ${client}`, ` · ${kind} `, h("span", { class: "detail" }, readable(detail)))),
    ),
  );
}

/** What an event says of itself is a text, or JSON. */
function readable(detail) {
  try {
    const found = JSON.parse(detail);
    if (found.rule) return `${found.rule}: ${found.value}`;
    return Object.entries(found).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  } catch {
    return detail;
  }
}

function lastRounds(rows) {
  const head = ["Round", "Loss", "Average", "Worst Local", "Sent", "Time"];
  const line = (row) => [row.round, number(row.loss), percent(row.average), percent(row.worst), bytes(row.bytes), duration(row.seconds)];
  return h(
    "div",
    { class: "scroller", tabindex: 0, role: "region", "aria-label": "Last rounds" },
    h("table", { class: "figures" }, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map((row) => h("tr", {}, line(row).map((text) => h("td", {}, String(text))))))),
  );
}

function aboutClients({ count, clients, rounds, evaluations, quantiles }) {
  if (!count) return "";
  const at = (share) => percent(quantiles[Math.round(share * (quantiles.length - 1))], 1);
  const who = clients.length < count ? `The worst, the middle and the best ${Math.floor(clients.length / 3)} of ${plural(count, "client")}` : `All ${plural(count, "client")}`;
  const when = rounds.length < evaluations ? `, in ${rounds.length} of ${evaluations} evaluated rounds` : "";
  return `${who}${when}, from the worst to the best in the last one. Worst ${at(0)}, lower tenth ${at(0.1)}, middle ${at(0.5)}, upper tenth ${at(0.9)}, best ${at(1)}.`;
}

function settingsOf({ config, versions, facts }) {
  const flat = (values, prefix = "") =>
    Object.entries(values).flatMap(([key, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length ? flat(value, `${prefix}${key}.`) : [[`${prefix}${key}`, value]]));
  const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const table = (title, values) =>
    h("div", {}, h("h3", {}, title), h("dl", { class: "pairs" }, flat(values).map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, written(value))))));
  return [h("div", { class: "columns" }, table("Found", facts), table("Versions", versions)), table("Config", config)];
}
