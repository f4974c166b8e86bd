//! One Rust type a Parquet column: its physical and logical type, and the levels that say what is
//! absent and where a list ends.

use std::sync::Arc;

use ::parquet::basic::{LogicalType, Repetition};
use ::parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int32Type, Int64Type,
};
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::writer::SerializedColumnWriter;
use ::parquet::schema::types::{Type, TypePtr};

use crate::base::{
    BlockId, EngineIndex, EngineStep, Generation, LogProb, ParseRequestIdError, Position, PromptId,
    RequestId, Step, TokenId, WeightVersion,
};

/// A cell as Parquet's crate holds it.
pub(super) type Physical<T> = <<T as Cell>::Physical as DataType>::T;

/// A value as one Parquet cell.
pub(super) trait Cell: Sized {
    type Physical: DataType;

    fn logical() -> Option<LogicalType>;
    fn to_parquet(self) -> Physical<Self>;
    fn from_parquet(value: Physical<Self>) -> Result<Self>;
}

macro_rules! cell {
    ($rust:ty, $physical:ty, $logical:expr, $to:expr, $from:expr) => {
        impl Cell for $rust {
            type Physical = $physical;

            fn logical() -> Option<LogicalType> {
                $logical
            }

            fn to_parquet(self) -> Physical<Self> {
                $to(self)
            }

            fn from_parquet(value: Physical<Self>) -> Result<Self> {
                $from(value)
            }
        }
    };
}

cell!(bool, BoolType, None, |v| v, Ok);
cell!(f32, FloatType, None, |v| v, Ok);
cell!(f64, DoubleType, None, |v| v, Ok);
// Parquet stores unsigned numbers as the signed ones of the same bits.
cell!(u32, Int32Type, Some(LogicalType::integer(32, false)), u32::cast_signed, |v: i32| Ok(
    v.cast_unsigned()
));
cell!(u64, Int64Type, Some(LogicalType::integer(64, false)), u64::cast_signed, |v: i64| Ok(
    v.cast_unsigned()
));
cell!(
    String,
    ByteArrayType,
    Some(LogicalType::String),
    |v: String| ByteArray::from(v.into_bytes()),
    |v: ByteArray| String::from_utf8(v.data().to_vec())
        .map_err(|error| ParquetError::General(error.to_string()))
);

/// A cell that is stored as another type's.
macro_rules! stored_as {
    ($inner:ty: $($rust:ty, $to:expr, $from:expr;)*) => {$(
        impl Cell for $rust {
            type Physical = <$inner as Cell>::Physical;

            fn logical() -> Option<LogicalType> {
                <$inner>::logical()
            }

            fn to_parquet(self) -> Physical<Self> {
                <$inner>::to_parquet($to(self))
            }

            fn from_parquet(value: Physical<Self>) -> Result<Self> {
                <$inner>::from_parquet(value).and_then($from)
            }
        }
    )*};
}

stored_as!(u32:
    BlockId, BlockId::get, |v| Ok(BlockId::new(v));
    EngineIndex, EngineIndex::get, |v| Ok(EngineIndex::new(v));
    Generation, Generation::get, |v| Ok(Generation::new(v));
    Position, Position::get, |v| Ok(Position::new(v));
    PromptId, PromptId::get, |v| Ok(PromptId::new(v));
    TokenId, TokenId::get, |v| Ok(TokenId::new(v));
);
stored_as!(u64:
    EngineStep, EngineStep::get, |v| Ok(EngineStep::new(v));
    Step, Step::get, |v| Ok(Step::new(v));
    WeightVersion, WeightVersion::get, |v| Ok(WeightVersion::new(v));
);
stored_as!(f32: LogProb, LogProb::get, |v| Ok(LogProb::new(v)););
stored_as!(String:
    RequestId, |id: RequestId| id.to_string(), |text: String| text
        .parse()
        .map_err(|error: ParseRequestIdError| ParquetError::General(error.to_string()));
);

type WriteCells = Box<dyn FnOnce(&mut SerializedColumnWriter<'_>) -> Result<()>>;

/// A column with its cells, ready to be written.
pub(super) struct Column {
    pub field: TypePtr,
    pub write: WriteCells,
}

/// Every row has a value.
pub(super) fn required<R, T: Cell>(name: &str, rows: &[R], cell: impl Fn(&R) -> T) -> Column {
    let values = rows.iter().map(|row| cell(row).to_parquet()).collect();
    Column {
        field: primitive::<T>(name, Repetition::REQUIRED),
        write: write::<T>(values, None, None),
    }
}

/// Absent is null.
pub(super) fn optional<R, T: Cell>(
    name: &str,
    rows: &[R],
    cell: impl Fn(&R) -> Option<T>,
) -> Column {
    let (mut values, mut defined) = (Vec::new(), Vec::new());
    for cell in rows.iter().map(cell) {
        defined.push(i16::from(cell.is_some()));
        values.extend(cell.map(T::to_parquet));
    }
    Column {
        field: primitive::<T>(name, Repetition::OPTIONAL),
        write: write::<T>(values, Some(defined), None),
    }
}

/// Definition levels of [`list`]: no list, an empty one, a null in one, a value in one.
pub(super) const ABSENT: i16 = 0;
pub(super) const EMPTY: i16 = 1;
pub(super) const NULL: i16 = 2;
pub(super) const VALUE: i16 = 3;

/// A list in a row, possibly empty, whose elements may be null; absent is null.
pub(super) fn list<R, T: Cell>(
    name: &str,
    rows: &[R],
    cells: impl Fn(&R) -> Option<Vec<Option<T>>>,
) -> Column {
    let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
    for list in rows.iter().map(cells) {
        let start = defined.len();
        let if_none = if list.is_some() { EMPTY } else { ABSENT };
        for cell in list.into_iter().flatten() {
            repeated.push(i16::from(defined.len() > start));
            defined.push(if cell.is_some() { VALUE } else { NULL });
            values.extend(cell.map(T::to_parquet));
        }
        if defined.len() == start {
            repeated.push(0);
            defined.push(if_none);
        }
    }
    Column { field: list_of::<T>(name), write: write::<T>(values, Some(defined), Some(repeated)) }
}

/// As [`list`], of values that are all there.
pub(super) fn full_list<R, T: Cell + Copy>(
    name: &str,
    rows: &[R],
    cells: impl Fn(&R) -> Option<&[T]>,
) -> Column {
    list(name, rows, |row| Some(cells(row)?.iter().copied().map(Some).collect()))
}

fn write<T: Cell>(
    values: Vec<Physical<T>>,
    defined: Option<Vec<i16>>,
    repeated: Option<Vec<i16>>,
) -> WriteCells {
    Box::new(move |column| {
        let writer = column.typed::<T::Physical>();
        writer.write_batch(&values, defined.as_deref(), repeated.as_deref()).map(|_| ())
    })
}

fn primitive<T: Cell>(name: &str, repetition: Repetition) -> TypePtr {
    let field = Type::primitive_type_builder(name, T::Physical::get_physical_type())
        .with_repetition(repetition)
        .with_logical_type(T::logical());
    Arc::new(field.build().expect("the logical types above fit their physical ones"))
}

/// The three-level form that the Parquet format prescribes for lists.
fn list_of<T: Cell>(name: &str) -> TypePtr {
    let repeated = Type::group_type_builder("list")
        .with_repetition(Repetition::REPEATED)
        .with_fields(vec![primitive::<T>("element", Repetition::OPTIONAL)]);
    let field = Type::group_type_builder(name)
        .with_repetition(Repetition::OPTIONAL)
        .with_logical_type(Some(LogicalType::List))
        .with_fields(vec![Arc::new(repeated.build().expect("a group of one field"))]);
    Arc::new(field.build().expect("a list of one group"))
}
