// Fills the choice of versions from ../versions.js of the folder that holds them, and goes to the
// same page of the chosen one, or to its first page where it has none of that name.
addEventListener("DOMContentLoaded", () => {
  const select = document.querySelector(".versions select");
  const known = window.gemmuleVersions ?? {};
  if (!select || Object.keys(known).length < 2) return;
  const here = select.dataset.version, page = select.dataset.page;
  for (const version of Object.keys(known)) {
    select.add(new Option(version, version, false, version === here));
  }
  const root = document.documentElement.dataset.content_root ?? "./";
  select.onchange = () => {
    const to = known[select.value].includes(page) ? page : "index";
    location.href = new URL(`${root}../${select.value}/${to}.html`, location.href);
  };
  select.parentElement.hidden = false;
});
