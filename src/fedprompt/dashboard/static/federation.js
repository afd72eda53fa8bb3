// A federation: its sites, the latest run, and what went wrong.

import { ask } from "./asking.js";
import { h, say, whenChanged } from "./dom.js";
import { ago, duration, NONE, percent, plural } from "./format.js";
import { section } from "./parts.js";

const SIGNS = { online: "●", offline: "▲", registered: "○", unknown: "○" };
const WORDS = { online: "connected", offline: "absent", registered: "never connected", unknown: "unknown" };

const seconds = (since) => (since ? Date.parse(since) / 1000 : null);
const counted = (rules) => Object.entries(rules).map(([rule, count]) => `${count} ${rule}`).join(", ") || NONE;

export function federation() {
  const about = h("p", { class: "about" });
  const problem = h("p", { class: "notice bad", role: "status", hidden: true });
  const tiles = h("div", { class: "tiles" });
  const rows = h("tbody", {});
  const heads = ["Site", "Status", "Last seen", "Last round", "Missed", "Late", "Refused"];
  const sites = h(
    "table",
    { class: "sites" },
    h("caption", { class: "unseen" }, "Sites"),
    h("thead", {}, h("tr", {}, heads.map((title) => h("th", { scope: "col" }, title)))),
    rows,
  );
  const events = h("ol", { class: "incidents" });
  const none = h("p", { class: "note" }, "Nothing was refused and nobody was missing.");
  const node = h(
    "div",
    { class: "federation" },
    h("h1", {}, "Federation"),
    about,
    problem,
    tiles,
    section("Sites", sites),
    section("What went wrong, the latest first", none, events),
  );
  let now = 0;

  const showTiles = whenChanged((told) => {
    const { run, sites: all, certificates } = told;
    const here = all.filter((site) => site.status === "online").length;
    const found = [["Sites connected", `${here} of ${all.length}`, told.answers ? "" : "the server does not answer"]];
    if (run) {
      found.push(
        ["Round", `${run.round} of ${run.rounds}`, run.finished ? "finished" : run.last_seconds ? `${duration(run.last_seconds)} for the last` : ""],
        ["Average", percent(run.average), `Worst Local ${percent(run.worst)}`],
        ["Updates refused", String(run.refused), counted(run.refused_by)],
        ["Updates missed", String(run.missed), run.late ? `${run.late} came late and counted` : ""],
      );
      if (run.epsilon !== null) found.push(["Epsilon spent", run.epsilon.toFixed(2), run.epsilon_left === null ? "no limit" : `${run.epsilon_left.toFixed(2)} left`]);
    }
    for (const each of certificates) found.push([`Certificate of the ${each.kind}`, plural(each.days, "day"), each.soon ? "expires soon" : "left"]);
    tiles.replaceChildren(
      ...found.map(([name, value, more]) => h("div", { class: "tile" }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "more-text" }, more))),
    );
  });

  const showSites = whenChanged((told) => {
    rows.replaceChildren(
      ...told.sites.map((site) => {
        const cell = (title, ...content) => h("td", { "data-title": title }, content);
        const sign = h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[site.status] ?? "○");
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, site.name),
          cell("Status", h("span", { class: "badge", "data-site": site.status }, sign, h("span", {}, WORDS[site.status] ?? site.status))),
          cell("Last seen", h("span", { "data-since": site.status === "registered" ? "" : seconds(site.since) ?? "", "data-online": site.status === "online" })),
          cell("Last round", site.last_round === null ? NONE : String(site.last_round)),
          cell("Missed", String(site.missed)),
          cell("Late", String(site.late)),
          cell("Refused", counted(site.refused)),
        );
      }),
    );
  });

  const showEvents = whenChanged((told) => {
    none.hidden = told.incidents.length > 0;
    events.replaceChildren(
      ...told.incidents.map((each) =>
        h("li", {}, h("span", { class: "when" }, `Round ${each.round}`), h("strong", {}, each.site), h("span", {}, each.rule === each.kind ? each.kind : `${each.kind} (${each.rule})`), h("span", { class: "reason" }, each.text)),
      ),
    );
  });

  return {
    node,
    title: "Federation",
    stays: (name) => name === "federation",
    async update(current) {
      const told = await ask("federation");
      if (!current()) return;
      now = told.now;
      const run = told.run ? h("a", { href: `#/run/${told.run.id}` }, told.run.name) : "no run so far";
      about.replaceChildren(`${told.address} · `, run);
      problem.hidden = !told.problem;
      say(problem, told.problem);
      showTiles({ run: told.run, sites: told.sites, certificates: told.certificates, answers: told.answers });
      showSites({ sites: told.sites });
      showEvents({ incidents: told.incidents });
      for (const each of rows.querySelectorAll("[data-since]")) {
        const since = Number(each.dataset.since);
        say(each, each.hasAttribute("data-online") ? "now" : since ? ago(since, now) : NONE);
      }
    },
  };
}
