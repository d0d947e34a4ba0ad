"use strict";

// Charts are drawn from the top, one after the other, so that a printed page has them all;
// one that comes near the window does not wait for its turn.

const drawings = JSON.parse(document.querySelector("script.drawings").textContent);
const themes = JSON.parse(document.querySelector("script.themes").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const places = [...document.querySelectorAll(".drawing")];

// Data come as columns, with words as numbers of a list: make records of them again.
function unpack(part) {
  if (part === null || typeof part !== "object") return part;
  if (Array.isArray(part)) return part.map(unpack);
  const made = {};
  for (const [key, value] of Object.entries(part)) {
    made[key] = key === "data" && value.columns ? { values: records(value) } : unpack(value);
  }
  return made;
}

function records({ columns, words }) {
  const fields = Object.entries(columns);
  const length = fields.length ? fields[0][1].length : 0;
  return Array.from({ length }, (_, row) => {
    const record = {};
    for (const [field, values] of fields) {
      const value = values[row];
      if (value !== null) record[field] = words[field] ? words[field][value] : value;
    }
    return record;
  });
}

async function draw(place) {
  if (place.dataset.state) return;
  place.dataset.state = "drawn";
  const { spec, dense } = drawings[places.indexOf(place)];
  const wide = { ...unpack(spec), width: "container", autosize: { type: "fit-x", contains: "padding" } };
  const config = dark.matches ? themes.dark : themes.light;
  await vegaEmbed(place, wide, { config, actions: false, renderer: dense ? "canvas" : "svg" });
  place.classList.add("drawn");
}

// What is saved is as wide as a figure, and dark on white whatever the page is.
async function save(number, kind) {
  const { title, spec } = drawings[number];
  const whole = { ...unpack(spec), width: 480, background: "white" };
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 80) + "." + kind;
  const compiled = vegaLite.compile(whole, { config: themes.light }).spec;
  const view = new vega.View(vega.parse(compiled), { renderer: "none" });
  let url;
  if (kind === "csv") url = "data:text/csv;charset=utf-8," + encodeURIComponent(table(whole.data.values));
  else url = await view.toImageURL(kind, 3);
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
}

function table(rows) {
  const fields = [...new Set(rows.flatMap(Object.keys))];
  // A cell that begins as a formula does would be one to a spreadsheet.
  const cell = (value) => `"${String(value ?? "").replace(/^[=+@-](?!\d)/, "'$&").replaceAll('"', '""')}"`;
  const lines = rows.map((row) => fields.map((field) => cell(row[field])).join(","));
  return [fields.join(","), ...lines].join("\n") + "\n";
}

places.forEach((place, number) => {
  for (const kind of ["svg", "png", "csv"]) {
    const button = document.createElement("button");
    button.textContent = kind === "csv" ? "data" : kind.toUpperCase();
    button.title = `save as ${kind.toUpperCase()}`;
    button.onclick = () => save(number, kind);
    place.nextElementSibling.append(button);
  }
});

const watcher = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "400px" },
);
places.forEach((place) => watcher.observe(place));
(function drawRest() {
  const place = places.find((one) => !one.dataset.state);
  // A pause between two, in which the page hears clicks.
  if (place) draw(place).finally(() => setTimeout(drawRest, 10));
})();
dark.addEventListener("change", () => {
  for (const place of places.filter((one) => one.dataset.state)) {
    delete place.dataset.state;
    draw(place);
  }
});

// Tables: a click on a head sorts by that column, another one the other way.

// A figure sorts by its raw value, "1,234 [1,100, 1,300]" as 1234, and words after all numbers.
function sortKey(cell) {
  const text = cell.textContent.trim();
  if (cell.dataset.number) return { text, number: parseFloat(cell.dataset.number) };
  const number = parseFloat(text.replace("−", "-").replaceAll(/(?<=\d),(?=\d{3})/g, ""));
  return { text, number: /^[+−-]?[\d.]/.test(text) ? number : NaN };
}

function compare(one, other) {
  const numbers = [one, other].map((key) => !Number.isNaN(key.number));
  if (numbers[0] && numbers[1]) return one.number - other.number;
  if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
  return one.text.localeCompare(other.text);
}

function sort(head) {
  const body = head.closest("table").tBodies[0];
  const descending = head.ariaSort === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...body.rows].map((row) => ({ row, key: sortKey(row.cells[head.cellIndex]) }));
  rows.sort((one, other) => (descending ? compare(other.key, one.key) : compare(one.key, other.key)));
  body.append(...rows.map(({ row }) => row));
}

for (const head of document.querySelectorAll(".figures thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  button.onclick = () => sort(head);
  head.append(button);
}
