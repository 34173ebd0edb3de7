// Mermaid and KaTeX are large, and few pages need them. Written while the page is parsed, so that they are there before
// the theme looks for diagrams: it would load a Mermaid from elsewhere.
{
  const assets = document.currentScript.src.replace(/load\.js.*$/, "")
  const load = (path) => document.write(`<script src="${assets}${path}"><\/script>`)
  if (document.querySelector(".mermaid")) {
    load("vendor/mermaid/mermaid.min.js")
    load("diagrams.js")
  }
  if (document.querySelector(".arithmatex")) {
    load("vendor/katex/katex.min.js")
    load("equations.js")
  }
}
