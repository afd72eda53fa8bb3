// Some runs side by side: the table of `fedprompt compare`, and a curve for each of its rows.

import { ask, Refused } from "./asking.js";
import { curves } from "./charts.js";
import { h, mark, say, whenChanged } from "./dom.js";
import { bytes, percent, plural } from "./format.js";
import { badge, progress, section, swatch } from "./parts.js";

export function comparison(rest) {
  const ids = [...new Set(rest.split(",").filter((id) => /^[0-9a-f]{16}$/.test(id)))];
  const share = { readY: percent, tickY: (value) => `${+(100 * value).toFixed(1)} %`, bounds: [0, 1] };
  const charts = {
    average: curves({ title: "Average by round", x: "Round", readX: String, ...share }),
    worst: curves({ title: "Worst Local by round", x: "Round", readX: String, ...share }),
    sent: curves({ title: "Bytes sent against Average", x: "Sent", xTitle: "Sent in both directions, up to a round", readX: bytes, log: true, ...share }),
  };
  const notice = h("p", { class: "notice", role: "status" }, "Comparing…");
  const chips = h("ul", { class: "chips", "aria-label": "Runs compared" });
  const table = h("div", {});
  const count = h("p", { class: "about" });
  const content = h(
    "div",
    { hidden: true },
    section("Comparison", table),
    h("div", { class: "grid" }, Object.values(charts).map(({ node }) => h("div", { class: "panel" }, node))),
  );
  const node = h("div", {}, h("p", { class: "crumbs" }, h("a", { href: "#/" }, "← All runs")), h("h1", {}, "Comparison"), count, chips, notice, content);
  const cards = new Map();

  const draw = whenChanged((answer) => {
    table.replaceChildren(tableOf(answer));
    const series = (pick, band) =>
      answer.curves.map(({ label, seeds, points }, place) => ({ label, place, points: points.map(pick), band: band && seeds.length > 1 ? points.map(band) : null }));
    charts.average.update(series(([round, average]) => [round, average], ([round, , low, high]) => [round, low, high]));
    charts.worst.update(series(([round, , , , worst]) => [round, worst]));
    charts.sent.update(series(([, average, , , , sent]) => [sent, average]));
  });

  function drawChips(entries) {
    for (const entry of entries) if (!cards.has(entry.id)) cards.set(entry.id, chip());
    const shown = new Set(entries.map((entry) => entry.id));
    for (const entry of entries) {
      cards.get(entry.id).update(entry, `#/compare/${ids.filter((id) => id !== entry.id).join(",")}`);
      if (!cards.get(entry.id).node.isConnected) chips.append(cards.get(entry.id).node);
    }
    for (const [id, card] of cards) if (!shown.has(id)) card.node.remove();
  }

  return {
    node,
    title: "Comparison",
    async update(current) {
      if (!ids.length) {
        content.hidden = true;
        notice.hidden = false;
        say(notice, "Nothing is selected. Tick runs in the list and compare them.");
        await ask("runs", { after: 1e15 });
        return;
      }
      try {
        const answer = await ask("compare", { ids: ids.join(",") });
        if (!current()) return;
        const { entries, missing, left_out: leftOut, now, ...figures } = answer;
        drawChips(entries);
        say(count, `${plural(entries.length, "run")} in ${plural(figures.curves.length, "row")}: runs that differ only in their seed share one, as long as they got equally far.`);
        const parts = [missing ? `${plural(missing, "run")} gone: moved or deleted.` : "", ...leftOut.map(({ name, reason }) => `${name} is left out. ${reason}`)].filter(Boolean);
        notice.hidden = !parts.length;
        say(notice, parts.join(" "));
        content.hidden = !figures.curves.length;
        if (figures.curves.length) draw(figures);
      } catch (error) {
        if (!(error instanceof Refused) || !current()) throw error;
        notice.hidden = false;
        say(notice, error.message);
      }
    },
    close() {
      for (const chart of Object.values(charts)) chart.close();
    },
  };
}

function chip() {
  const link = h("a", {});
  const state = badge();
  const done = progress();
  const away = h("a", { class: "remove" }, "×");
  return {
    node: h("li", {}, link, state.node, done.node, away),
    update(entry, without) {
      say(link, entry.name);
      mark(link, "href", `#/run/${entry.id}`);
      mark(away, "href", without);
      mark(away, "aria-label", `Take ${entry.name} out of the comparison`);
      state.update(entry);
      done.update(entry);
    },
  };
}

function tableOf({ header, cells, notes, explanations, curves: lines }) {
  const head = h("tr", {}, header.map((title) => h("th", { scope: "col" }, title)));
  const body = cells.map((line, place) =>
    h(
      "tr",
      {},
      line.map(([text, best], column) => {
        const content = best ? h("b", {}, text) : text;
        if (column) return h("td", {}, content);
        return h("th", { scope: "row", title: lines[place].names.join(", ") }, h("span", { class: "row-name" }, swatch(place), h("span", {}, content)));
      }),
    ),
  );
  return h(
    "div",
    {},
    h("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Comparison table" }, h("table", { class: "figures comparison" }, h("thead", {}, head), h("tbody", {}, body))),
    notes.map((note) => h("p", { class: "note strong" }, note)),
    explanations.map((text) => h("p", { class: "note" }, text)),
  );
}
