//! The Oxtile kernel DSL: thread identity, memory views, barriers, pipelines, number formats.
