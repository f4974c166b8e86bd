//! Whole files: columns to bytes, and back by name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::parquet::basic::Compression;
use ::parquet::column::reader::get_typed_column_reader;
use ::parquet::data_type::DataType;
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::types::Type;

use super::super::disk::write_atomic;
use super::super::ReportError;
use super::column::{Cell, Column, ABSENT, EMPTY, NULL, VALUE};
use super::guard::guarded;

/// Writes the columns as one row group, atomically.
pub(super) fn write(path: &Path, columns: Vec<Column>) -> Result<(), ReportError> {
    let bytes = bytes(columns)
        .map_err(|source| ReportError::MakeParquet { path: path.to_owned(), source })?;
    write_atomic(path, &bytes)
}

fn bytes(columns: Vec<Column>) -> Result<Vec<u8>, ParquetError> {
    let fields = columns.iter().map(|column| Arc::clone(&column.field)).collect();
    let schema = Type::group_type_builder("schema").with_fields(fields).build()?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_created_by("gapscope".to_owned())
        .build();
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties))?;
    let mut row_group = file.next_row_group()?;
    for column in columns {
        let mut writer = row_group.next_column()?.expect("the schema has this column");
        (column.write)(&mut writer)?;
        writer.close()?;
    }
    row_group.close()?;
    file.into_inner()
}

/// A file to be read column by column.
pub(super) struct Table {
    path: PathBuf,
    reader: SerializedFileReader<File>,
}

/// One column as it is stored: the cells that have a value, and the levels of all cells.
struct Stored<T> {
    cells: Vec<T>,
    defined: Vec<i16>,
    repeated: Vec<i16>,
}

impl Table {
    pub(super) fn open(path: &Path) -> Result<Self, ReportError> {
        let file = File::open(path).map_err(ReportError::io("read", path))?;
        let reader = guarded(|| SerializedFileReader::new(file))
            .map_err(|source| ReportError::ReadParquet { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), reader })
    }

    /// As many empty rows as the file has, for the functions below to fill. They are counted in a
    /// column without nulls: a damaged footer may state more rows than any memory holds.
    pub(super) fn empty_rows<R: Default + Clone, T: Cell>(
        &self,
        name: &str,
    ) -> Result<Vec<R>, ReportError> {
        let (rows, cells) = (self.num_rows(), self.stored::<T>(name, [0, 0])?.cells.len());
        if u64::try_from(rows) != Ok(cells as u64) {
            return Err(self.bad(name, format!("{cells} cells, {rows} rows")));
        }
        Ok(vec![R::default(); cells])
    }

    fn num_rows(&self) -> i64 {
        self.reader.metadata().file_metadata().num_rows()
    }

    /// Gives every row its cell of a column without nulls.
    pub(super) fn required<R, T: Cell>(
        &self,
        name: &str,
        rows: &mut [R],
        set: impl Fn(&mut R, T),
    ) -> Result<(), ReportError> {
        let stored = self.stored::<T>(name, [0, 0])?;
        self.fill(name, rows, stored.cells, set)
    }

    /// Gives every row its cell of a column with nulls.
    pub(super) fn optional<R, T: Cell>(
        &self,
        name: &str,
        rows: &mut [R],
        set: impl Fn(&mut R, Option<T>),
    ) -> Result<(), ReportError> {
        let stored = self.stored::<T>(name, [1, 0])?;
        let mut cells = stored.cells.into_iter();
        let cells = stored.defined.iter().map(|&level| match level {
            0 => Ok(None),
            _ => self.next(name, &mut cells).map(Some),
        });
        self.fill(name, rows, cells.collect::<Result<_, _>>()?, set)
    }

    /// Gives every row its list; `None` is a null.
    pub(super) fn list<R, T: Cell>(
        &self,
        name: &str,
        rows: &mut [R],
        set: impl Fn(&mut R, Option<Vec<Option<T>>>),
    ) -> Result<(), ReportError> {
        let stored = self.stored::<T>(name, [VALUE, 1])?;
        let mut cells = stored.cells.into_iter();
        let mut lists: Vec<Option<Vec<Option<T>>>> = Vec::new();
        for (&level, &repeated) in stored.defined.iter().zip(&stored.repeated) {
            if repeated == 0 {
                lists.push((level != ABSENT).then(Vec::new));
            }
            if let ABSENT | EMPTY = level {
                continue;
            }
            let cell = if level == NULL { None } else { Some(self.next(name, &mut cells)?) };
            let list = lists.last_mut().and_then(Option::as_mut);
            list.ok_or_else(|| self.bad(name, "starts inside a list"))?.push(cell);
        }
        self.fill(name, rows, lists, set)
    }

    /// As [`Table::list`], where a null in a list is an error.
    pub(super) fn full_list<R, T: Cell>(
        &self,
        name: &str,
        rows: &mut [R],
        set: impl Fn(&mut R, Option<Vec<T>>),
    ) -> Result<(), ReportError> {
        let nulls = std::cell::Cell::new(0_usize);
        self.list(name, rows, |row, list: Option<Vec<Option<T>>>| {
            let full = list.map(|list| {
                let len = list.len();
                let full: Vec<T> = list.into_iter().flatten().collect();
                nulls.set(nulls.get() + len - full.len());
                full
            });
            set(row, full);
        })?;
        match nulls.get() {
            0 => Ok(()),
            nulls => Err(self.bad(name, format!("{nulls} nulls inside its lists"))),
        }
    }

    /// The value of a cell that has one.
    fn next<T>(&self, name: &str, cells: &mut impl Iterator<Item = T>) -> Result<T, ReportError> {
        cells.next().ok_or_else(|| self.bad(name, "has fewer values than cells with one"))
    }

    fn fill<R, C>(
        &self,
        name: &str,
        rows: &mut [R],
        cells: Vec<C>,
        set: impl Fn(&mut R, C),
    ) -> Result<(), ReportError> {
        if cells.len() != rows.len() {
            return Err(self.bad(name, format!("{} cells, {} rows", cells.len(), rows.len())));
        }
        rows.iter_mut().zip(cells).for_each(|(row, cell)| set(row, cell));
        Ok(())
    }

    fn bad(&self, column: &str, found: impl ToString) -> ReportError {
        let column = column.to_owned();
        ReportError::BadColumn { path: self.path.clone(), column, found: found.to_string() }
    }

    /// `levels`: the greatest definition and repetition level that the column must have.
    fn stored<T: Cell>(&self, name: &str, levels: [i16; 2]) -> Result<Stored<T>, ReportError> {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        let index = schema
            .columns()
            .iter()
            .position(|column| column.path().parts()[0] == name)
            .ok_or_else(|| self.bad(name, "is missing"))?;
        let column = schema.column(index);
        let found = [column.max_def_level(), column.max_rep_level()];
        if column.physical_type() != T::Physical::get_physical_type() || found != levels {
            return Err(self.bad(name, format!("has another type: {:?}", column.self_type())));
        }
        let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
        for group in 0..self.reader.num_row_groups() {
            let read = || {
                let group = self.reader.get_row_group(group)?;
                let mut rows_left = usize::try_from(group.metadata().num_rows())?;
                let column = group.get_column_reader(index)?;
                let mut column = get_typed_column_reader::<T::Physical>(column);
                while rows_left > 0 {
                    let (rows, _, _) = column.read_records(
                        rows_left,
                        Some(&mut defined),
                        Some(&mut repeated),
                        &mut values,
                    )?;
                    if rows == 0 {
                        return Err(ParquetError::EOF(format!("{rows_left} rows are missing")));
                    }
                    rows_left -= rows;
                }
                Ok(())
            };
            guarded(read)
                .map_err(|source| ReportError::ReadParquet { path: self.path.clone(), source })?;
        }
        let cells = values.into_iter().map(T::from_parquet).collect::<Result<_, _>>();
        Ok(Stored { cells: cells.map_err(|error| self.bad(name, error))?, defined, repeated })
    }
}
