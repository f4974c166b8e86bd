//! A story of headed paragraphs and tables, as text and as one page.

use std::fmt::Write;
use std::path::Path;

use super::disk::write_atomic;
use super::html::document;
use super::html::text::visible;
use super::ReportError;

/// Columns of a line of text.
const WIDTH: usize = 96;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Story {
    pub title: String,
    pub sections: Vec<Section>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub heading: &'static str,
    pub blocks: Vec<Block>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// One paragraph, wrapped where it is shown.
    Text(String),
    /// Lines that are aligned already.
    Table(String),
}

impl Story {
    /// For a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        for Section { heading, blocks } in &self.sections {
            writeln!(text, "\n{heading}").expect("a string grows");
            for block in blocks {
                match block {
                    Block::Text(paragraph) => text += &wrapped(paragraph),
                    Block::Table(table) => {
                        table.lines().for_each(|line| {
                            writeln!(text, "  {line}").expect("a string grows");
                        });
                    }
                }
            }
        }
        text
    }

    fn page(&self) -> String {
        let mut body = format!(
            "<header>\n<h1>{}</h1>\n</header>\n<main class=\"sweep\">\n",
            visible(&self.title)
        );
        for Section { heading, blocks } in &self.sections {
            write!(body, "<section>\n<h2>{heading}</h2>\n").expect("a string grows");
            for block in blocks {
                match block {
                    Block::Text(paragraph) => writeln!(body, "<p>{}</p>", visible(paragraph)),
                    Block::Table(table) => {
                        let lines: Vec<String> = table.lines().map(visible).collect();
                        writeln!(body, "<pre class=\"scroll-x\">{}</pre>", lines.join("\n"))
                    }
                }
                .expect("a string grows");
            }
            body += "</section>\n";
        }
        document(&self.title, &(body + "</main>\n"))
    }
}

/// Writes a story's text and page, atomically.
pub fn write_story(txt: &Path, html: &Path, story: &Story) -> Result<(), ReportError> {
    write_atomic(txt, story.text().as_bytes())?;
    write_atomic(html, story.page().as_bytes())
}

/// Lines of at most [`WIDTH`] columns, indented; a longer word has a line of its own.
fn wrapped(paragraph: &str) -> String {
    let (mut text, mut line) = (String::new(), String::new());
    for word in paragraph.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH - 2 {
            writeln!(text, "  {line}").expect("a string grows");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    writeln!(text, "  {line}").expect("a string grows");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_and_nothing_in_them_is_markup() {
        let long = "word ".repeat(30);
        let story = Story {
            title: "a <b>".to_owned(),
            sections: vec![Section {
                heading: "First",
                blocks: vec![
                    Block::Text(long.trim_end().to_owned()),
                    Block::Table("a  <b>\nc  d\n".to_owned()),
                ],
            }],
        };
        let text = story.text();
        assert!(text.starts_with("a <b>\n\nFirst\n  word word"), "{text}");
        assert!(text.ends_with("\n  a  <b>\n  c  d\n"), "{text}");
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 30);
        let page = story.page();
        assert!(page.contains("<pre class=\"scroll-x\">a  &lt;b&gt;\nc  d</pre>"), "{page}");
        assert!(!page.contains("<b>"), "{page}");
    }
}
