use super::*;
use crate::model::Preset;

fn mamba(conv: u64, conv_dtype: Dtype, ssm_elements: u64, ssm_dtype: Dtype) -> LayerCache {
    LayerCache::Mamba { conv_elements: conv, conv_dtype, ssm_elements, ssm_dtype }
}

/// In bf16: attention at layers 7 and 21 of 28.
fn jamba_3b(ssm_dtype: Dtype) -> CacheSpec {
    CacheSpec::of_model(&Preset::Jamba3bShape.config(), Dtype::Bf16, ssm_dtype, 4096)
}

/// In f32: attention at layer 2 of 4.
fn tiny_jamba() -> CacheSpec {
    CacheSpec::of_model(&Preset::TinyJamba.config(), Dtype::F32, Dtype::F32, 96)
}

/// Layers by letter: m and a are those of tiny-jamba.
fn layout_of(letters: &str) -> Layout {
    let tiny = tiny_jamba().layers;
    let layers = letters.chars().map(|letter| tiny[if letter == 'a' { 2 } else { 0 }]).collect();
    Layout::new(&CacheSpec { layers, max_model_len: 96 }).unwrap()
}

#[test]
fn pages_strides_and_first_wrapped_blocks() {
    let cases = [
        (jamba_3b(Dtype::F32), 704, 360_448, 90_112, 32, 47_663, 40_960),
        (jamba_3b(Dtype::Bf16), 384, 196_608, 98_304, 32, 43_691, 32_768),
        (tiny_jamba(), 48, 12_288, 3_072, 22, 1_366, 2_048),
    ];
    for (spec, block_tokens, page, stride, bits, first, lands) in cases {
        let layout = Layout::new(&spec).unwrap();
        assert_eq!(layout.block_tokens, Some(block_tokens));
        assert_eq!(layout.page_bytes, page);
        assert_eq!(layout.state_stride, Some(stride));
        assert_eq!(layout.first_wrapped_block(bits), Some(BlockId::new(first)));
        assert_eq!(state_offset(u64::from(first), stride, bits), lands);
        assert_eq!(layout.first_wrapped_block(64), None);
    }
}

#[test]
fn jamba_3b_has_thirteen_state_groups_and_one_of_attention() {
    let layout = Layout::new(&jamba_3b(Dtype::F32)).unwrap();
    assert_eq!((layout.groups.len(), layout.num_mamba_groups, layout.num_buffers), (14, 13, 2));
    assert_eq!(layout.block_bytes(), 720_896);
    // The 26 Mamba layers, in model order, dealt to 13 groups: the first gets the 1st and the 14th
    // of them.
    let layers =
        |group: usize| layout.groups[group].layers.iter().map(|l| l.get()).collect::<Vec<_>>();
    assert_eq!((layers(0), layers(6), layers(12)), (vec![0, 14], vec![6, 20], vec![13, 27]));
    assert_eq!(layers(13), [7, 21]);
    let location = |layer: usize| match layout.layers[layer] {
        LayerPlace { group, view: CacheView::State(state) } => (group.get(), state.buffer),
        LayerPlace { group, view: CacheView::KeyValue(kv) } => (group.get(), kv.buffer),
    };
    assert_eq!([location(0), location(14), location(20)], [(0, 0), (0, 1), (6, 1)]);
    assert_eq!([location(7), location(21), location(27)], [(13, 0), (13, 1), (12, 1)]);
    for (tokens, blocks) in [(1, 14), (704, 14), (705, 15), (4096, 19)] {
        assert_eq!(layout.blocks_for(tokens), blocks, "{tokens} tokens");
    }
}

#[test]
fn groups_by_the_counts_of_the_two_kinds() {
    // (layers, layers of each group, Mamba groups, buffers)
    let cases: [(&str, &[&[u16]], usize, usize); 6] = [
        ("mmam", &[&[0], &[1], &[3], &[2]], 3, 1),
        ("ammama", &[&[1, 2, 4], &[0, 3, 5]], 1, 3),
        ("mmmmmaaaa", &[&[0, 2, 4], &[1, 3], &[5, 6, 7, 8]], 2, 4),
        ("mmmmmmaaaaa", &[&[0, 1, 2, 3, 4, 5], &[6, 7, 8, 9, 10]], 1, 6),
        ("mmm", &[&[0, 1, 2]], 1, 3),
        ("aaa", &[&[0, 1, 2]], 0, 3),
    ];
    for (letters, expected, num_mamba_groups, num_buffers) in cases {
        let layout = layout_of(letters);
        let groups: Vec<Vec<u16>> = layout
            .groups
            .iter()
            .map(|group| group.layers.iter().map(|layer| layer.get()).collect())
            .collect();
        assert_eq!(groups, expected, "{letters}");
        assert_eq!(layout.num_mamba_groups, num_mamba_groups, "{letters}");
        assert_eq!(layout.num_buffers, num_buffers, "{letters}");
    }
}

#[test]
fn models_of_one_kind_have_no_padding() {
    let mamba = layout_of("mmm");
    assert_eq!((mamba.page_bytes, mamba.block_tokens), (1_536 + 8_192, None));
    assert_eq!(mamba.state_stride, Some(2_432));
    assert_eq!((mamba.blocks_for(1), mamba.blocks_for(96)), (1, 1));
    let attention = layout_of("aaa");
    assert_eq!((attention.page_bytes, attention.block_tokens), (16 * 256, Some(16)));
    assert_eq!((attention.state_stride, attention.first_wrapped_block(8)), (None, None));
    assert_eq!((attention.blocks_for(16), attention.blocks_for(17)), (1, 2));
}

#[test]
fn a_small_state_still_gets_a_block_of_sixteen_tokens() {
    let mut spec = tiny_jamba();
    for layer in [0, 1, 3] {
        spec.layers[layer] = mamba(3, Dtype::F32, 16, Dtype::F32);
    }
    let layout = Layout::new(&spec).unwrap();
    assert_eq!((layout.block_tokens, layout.page_bytes), (Some(16), 4_096));
}

#[test]
fn block_counts_for_given_memory() {
    let gib = 1_u64 << 30;
    // (spec, memory, utilization, weights, override, blocks): floor((memory · utilization -
    // weights) / block bytes)
    let cases = [
        (tiny_jamba(), 64 << 20, 0.5, 1_000_000, None, 2_649),
        (tiny_jamba(), 12_288 * 10, 1.0, 0, None, 10),
        (tiny_jamba(), 12_288 * 10, 1.0, 1, None, 9),
        (tiny_jamba(), 12_288 * 10, 1.0, 1, Some(1_441), 1_441),
        (tiny_jamba(), 64 << 20, 0.5, 1_000_000, Some(6), 6),
        (jamba_3b(Dtype::F32), 80 * gib, 0.9, 6_060_000_000, None, 98_834),
        (jamba_3b(Dtype::F32), 80 * gib, 0.2, 6_060_000_000, None, 15_425),
        (jamba_3b(Dtype::Bf16), 141 * gib, 0.2, 6_060_000_000, None, 61_593),
    ];
    for (spec, device_memory, gpu_memory_utilization, used_bytes, over, blocks) in cases {
        let memory = BlockMemory {
            device_memory,
            gpu_memory_utilization,
            used_bytes,
            engines: 1,
            num_gpu_blocks_override: over,
        };
        let layout = Layout::new(&spec).unwrap();
        assert_eq!(layout.num_blocks(&memory), Ok(blocks), "{memory:?}");
        // Two engines need twice of everything, but for what is overridden.
        let device_memory = 2 * memory.device_memory;
        let shared = BlockMemory { device_memory, engines: 2, ..memory };
        assert_eq!(layout.num_blocks(&shared), Ok(blocks), "{shared:?}");
    }
}

#[test]
fn too_few_blocks_say_how_many_are_needed() {
    let layout = Layout::new(&tiny_jamba()).unwrap();
    let mut memory = BlockMemory {
        device_memory: 100_000,
        gpu_memory_utilization: 0.5,
        used_bytes: 1_000,
        engines: 1,
        num_gpu_blocks_override: Some(5),
    };
    assert_eq!(
        layout.num_blocks(&memory).unwrap_err().to_string(),
        "engine.num_gpu_blocks_override is 5, but one request of engine.max_model_len = 96 tokens \
         needs 6 blocks, the null block included: raise the override to at least 6 or lower \
         max_model_len"
    );
    memory.num_gpu_blocks_override = None;
    assert_eq!(
        layout.num_blocks(&memory).unwrap_err().to_string(),
        "engine.device_memory = 100000 bytes at gpu_memory_utilization = 0.5 leaves 3 blocks \
         after 1000 bytes of weights, but one request of engine.max_model_len = 96 tokens needs \
         6, the null block included: raise device_memory to at least 149456, raise \
         gpu_memory_utilization, or lower max_model_len"
    );
    let shared = BlockMemory { engines: 2, ..memory };
    let error = layout.num_blocks(&shared).unwrap_err().to_string();
    assert!(error.contains(" leaves each of 2 engines 1 blocks after 1000 bytes"), "{error}");
    assert!(error.contains("raise device_memory to at least 298912, "), "{error}");
    memory.device_memory = 149_456;
    assert_eq!(layout.num_blocks(&memory), Ok(6));
    memory.used_bytes = 200_000;
    assert!(matches!(
        layout.num_blocks(&memory),
        Err(EngineError::MemoryTooSmall { found: 0, .. })
    ));
}

#[test]
fn models_without_a_plan_are_refused() {
    let none = CacheSpec { layers: vec![], max_model_len: 96 };
    assert_eq!(Layout::new(&none), Err(EngineError::NoLayers));

    let mut unequal = tiny_jamba();
    unequal.layers[3] = mamba(384, Dtype::F32, 2_048, Dtype::Bf16);
    let (first, other) = (LayerId::new(0), LayerId::new(3));
    assert_eq!(Layout::new(&unequal), Err(EngineError::UnequalPages { first, other }));

    // A page that is not whole words, and a state that begins within an element.
    let cases = [
        (mamba(3, Dtype::Bf16, 16, Dtype::F32), 6, 70, 4),
        (mamba(3, Dtype::Bf16, 16, Dtype::Bf16), 6, 38, 2),
    ];
    for (layer, ssm_offset, page_bytes, element_bytes) in cases {
        let error = EngineError::StateNotAligned { ssm_offset, page_bytes, element_bytes };
        let spec = CacheSpec { layers: vec![layer], max_model_len: 96 };
        assert_eq!(Layout::new(&spec), Err(error));
    }
}

#[test]
fn layers_view_their_pages() {
    let layout = Layout::new(&jamba_3b(Dtype::F32)).unwrap();
    let state = StateView {
        buffer: 1,
        conv_dtype: Dtype::Bf16,
        conv_elements: 15_360,
        ssm_offset: 30_720,
        ssm_dtype: Dtype::F32,
        ssm_elements: 81_920,
        ssm_stride: 90_112,
    };
    assert_eq!(layout.layers[14].view, CacheView::State(state));
    let kv = KeyValueView { buffer: 0, dtype: Dtype::Bf16, block_tokens: 704, row: 128 };
    assert_eq!(layout.layers[7].view, CacheView::KeyValue(kv));
    // Keys and values of a block fill the page; the state leaves some of it unused.
    assert_eq!(2 * 704 * 128 * 2, layout.page_bytes);
}
