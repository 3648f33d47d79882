// Lists what a reader would stumble over: cut or overflowing boxes, words outside their drawing or
// on each other, and texts whose contrast with what lies behind them is below 4.5.
(() => {
  const found = [], shown = (el) => el.checkVisibility() && el.getClientRects().length > 0;
  const told = (el) => `${el.tagName.toLowerCase()}.${el.getAttribute("class") ?? ""} "${(el.textContent ?? "").trim().slice(0, 40)}"`;
  const numbers = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3)
    .map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const seen = (colour) => colour.startsWith("rgb") && (numbers(colour)[3] ?? 1) > 0.5;
  const behind = (el) => {
    for (let at = el; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (seen(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const cell = (text) => {  // the filled path of a map that lies under a number
    const box = text.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    const svg = text.closest("svg");
    for (const path of svg.querySelectorAll("g.cells path, g.cells use")) {
      const at = path.getBoundingClientRect();
      if (at.left <= x && x <= at.right && at.top <= y && y <= at.bottom) return getComputedStyle(path).fill;
    }
    return null;
  };
  const judge = (what, colour, back) => {
    const ratio = contrast(colour, back);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)} of ${what}: ${colour} on ${back}`);
  };
  const page = document.documentElement;
  if (page.scrollWidth > innerWidth) found.push(`the page is ${page.scrollWidth} wide in ${innerWidth}`);
  let texts = 0, boxes = 0;
  for (const el of document.body.querySelectorAll("*")) {
    if (el.closest("svg") || ["SCRIPT", "STYLE"].includes(el.tagName) || !shown(el)) continue;
    boxes += 1;
    if (el.clientWidth && el.scrollWidth > el.clientWidth + 1) found.push(`cut at the side: ${told(el)} ${el.scrollWidth} in ${el.clientWidth}`);
    const box = el.getBoundingClientRect();
    if (box.right > innerWidth + 1 || box.left < -1) found.push(`beside the page: ${told(el)}`);
    const own = [...el.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (own) { texts += 1; judge(told(el), getComputedStyle(el).color, behind(el)); }
    const before = getComputedStyle(el, "::before");
    if (!["none", "normal"].includes(before.content)) judge(`before ${told(el)}`, before.color, behind(el));
  }
  let drawings = 0;
  for (const svg of document.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    drawings += 1;
    const frame = svg.getBoundingClientRect(), placed = [];
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (!text.textContent.trim() || !box.width) continue;
      texts += 1;
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        found.push(`outside its drawing: ${told(text)} of "${svg.getAttribute("aria-label")}"`);
      const under = text.closest("g.value") ? cell(text) : null;
      if (text.closest("g.value") && !under) found.push(`no cell under ${told(text)}`);
      judge(told(text), getComputedStyle(text).fill, under ?? behind(svg.parentElement));
      for (const [other, at] of placed) {
        const wide = Math.min(at.right, box.right) - Math.max(at.left, box.left);
        const tall = Math.min(at.bottom, box.bottom) - Math.max(at.top, box.top);
        if (wide > 1 && tall > 0.45 * Math.min(box.height, at.height))
          found.push(`on each other: ${told(other)} and ${told(text)} of "${svg.getAttribute("aria-label")}"`);
      }
      placed.push([text, box]);
    }
  }
  return { found, texts, boxes, drawings };
})()
