"""The page's script: the sample browser, and where the reader is. Without it all texts are listed."""

SCRIPT = """
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const list = byId("texts");
  if (list) {
    const items = [...list.children].map((item) => ({
      item, code: item.dataset.code, text: item.querySelector(".text").firstElementChild,
      words: item.textContent.toLowerCase(),
    }));
    const code = byId("by-code"), words = byId("by-words"), found = byId("found"), none = byId("none");
    const mark = (shown, sought) => {
      if (!("highlights" in CSS)) return;
      CSS.highlights.delete("found");
      if (!sought) return;
      const ranges = [];
      for (const { text } of shown) {
        const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
        for (let node = walker.nextNode(); node; node = walker.nextNode()) {
          const low = node.data.toLowerCase();
          if (low.length !== node.data.length) continue;
          for (let at = low.indexOf(sought); at >= 0; at = low.indexOf(sought, at + sought.length)) {
            const range = new Range();
            range.setStart(node, at);
            range.setEnd(node, at + sought.length);
            ranges.push(range);
          }
        }
      }
      CSS.highlights.set("found", new Highlight(...ranges));
    };
    const show = () => {
      const sought = words.value.trim().toLowerCase();
      const shown = items.filter((i) => (!code.value || i.code === code.value) && i.words.includes(sought));
      const kept = new Set(shown);
      for (const i of items) i.item.hidden = !kept.has(i);
      found.textContent = `${shown.length} of ${items.length} texts shown`;
      none.hidden = shown.length > 0;
      mark(shown, sought);
    };
    code.addEventListener("change", show);
    words.addEventListener("input", show);
    byId("all").addEventListener("click", () => { code.value = ""; words.value = ""; show(); words.focus(); });
    document.querySelector(".tools").hidden = false;
    show();
  }
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const sections = [...document.querySelectorAll("main section")];
  const here = () => {
    const passed = sections.filter((s) => s.getBoundingClientRect().top < innerHeight / 3);
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
    const current = atEnd ? sections[sections.length - 1] : passed[passed.length - 1] || sections[0];
    for (const [id, link] of links) {
      if (current && id === current.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; here(); });
  }, { passive: true });
  here();
})();
"""
