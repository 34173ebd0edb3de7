// The theme's settings of Mermaid, and these: text as large as on the page around a diagram, which scrolls where it is wide.
const { initialize } = mermaid
mermaid.initialize = ({ sequence, ...settings }) =>
  initialize({
    ...settings,
    flowchart: { useMaxWidth: false, wrappingWidth: 460 },
    sequence: { ...sequence, useMaxWidth: false, mirrorActors: false, wrap: true, width: 120, actorMargin: 40, diagramMarginX: 0 },
  })
