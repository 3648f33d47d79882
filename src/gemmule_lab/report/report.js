// Sorts a table by the button in a column's head, filters its rows by words; "/" goes to a filter.
for (const table of document.querySelectorAll("table.sort")) {
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 3) continue;
  table.classList.add("live");
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].textContent.trim();
      const number = (text) => parseFloat(text.replace(/[~,]/g, ""));
      body.append(...[...body.rows].sort((one, other) => {
        const [a, b] = [key(one), key(other)], [x, y] = [number(a), number(b)];
        if (!a || !b) return a ? -1 : b ? 1 : 0;  // what says nothing stays last
        const order = head.classList.contains("n") ? x - y : a.localeCompare(b, "en", { numeric: true });
        return up ? order : -order;
      }));
    });
  });
  const label = document.createElement("label"), told = document.createElement("output");
  const field = Object.assign(document.createElement("input"), { type: "search" });
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    told.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  field.addEventListener("input", show);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { field.value = ""; show(); }
  });
  label.append("Rows with these words ", field);
  const line = Object.assign(document.createElement("p"), { className: "filter" });
  line.append(label, " ", told);
  table.before(line);
  show();
}
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input")) return;
  const field = [...document.querySelectorAll(".filter input")].find((one) => one.checkVisibility());
  if (field) { event.preventDefault(); field.focus(); }
});
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
});
