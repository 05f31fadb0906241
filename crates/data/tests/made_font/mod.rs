//! The smallest TrueType fonts that are fonts, made of bars: tests need none installed.

/// A polygon, in thousandths of the em.
pub type Polygon = Vec<(i16, i16)>;

/// A font of a family with characters and their polygons.
pub fn font(family: &str, characters: &[(char, Vec<Polygon>)]) -> Vec<u8> {
    let mut glyphs = vec![Vec::new()]; // The first is drawn for what a font does not have.
    glyphs.extend(characters.iter().map(|(_, polygons)| glyph(polygons)));
    let (mut loca, mut glyf) = (be32(0), Vec::new());
    for glyph in &glyphs {
        glyf.extend(glyph);
        loca.extend(be32(glyf.len()));
    }
    let mut tables = [
        (b"cmap", cmap(characters)),
        (b"glyf", glyf),
        (b"head", head()),
        (b"hhea", [be32(0x10000), vec![0; 30], be16(1)].concat()),
        (b"hmtx", [be16(1000), vec![0; 2 * glyphs.len()]].concat()),
        (b"loca", loca),
        (b"maxp", [be32(0x10000), be16(glyphs.len()), vec![0; 26]].concat()),
        (b"name", name(family)),
    ];
    let mut directory = [be32(0x10000), be16(tables.len()), vec![0; 6]].concat();
    let mut offset = directory.len() + 16 * tables.len();
    for (tag, table) in &mut tables {
        directory.extend([tag.to_vec(), be32(0), be32(offset), be32(table.len())].concat());
        table.resize(table.len().next_multiple_of(4), 0);
        offset += table.len();
    }
    tables.into_iter().for_each(|(_, table)| directory.extend(table));
    directory
}

/// Letters of bars: which of six is the character's, how wide they are is the family's.
pub fn bars(family: &str, characters: &str, width: i16) -> Vec<u8> {
    let letter = |(i, character): (usize, char)| {
        let bar = |row: i16| {
            vec![(0, 150 * row), (width, 150 * row), (width, 150 * row + 90), (0, 150 * row + 90)]
        };
        let rows = (0..6).filter(|row| (i + 1) >> row & 1 == 1);
        (character, [6].into_iter().chain(rows).map(bar).collect())
    };
    font(family, &characters.chars().enumerate().map(letter).collect::<Vec<_>>())
}

/// Fonts in one file.
pub fn collection(fonts: &[Vec<u8>]) -> Vec<u8> {
    let mut header = [b"ttcf".to_vec(), be32(0x10000), be32(fonts.len())].concat();
    let (mut all, start) = (Vec::new(), header.len() + 4 * fonts.len());
    for font in fonts {
        let base = start + all.len();
        header.extend(be32(base));
        let mut font = font.clone();
        for table in 0..usize::from(font[5]) {
            let at = 12 + 16 * table + 8;
            let offset = u32::from_be_bytes(font[at..at + 4].try_into().unwrap()) as usize;
            font[at..at + 4].copy_from_slice(&be32(base + offset));
        }
        all.extend(font);
    }
    [header, all].concat()
}

fn glyph(polygons: &[Polygon]) -> Vec<u8> {
    let points: Vec<(i16, i16)> = polygons.concat();
    let mut glyph = [be16(polygons.len()), vec![0; 8]].concat();
    let mut end = 0;
    for polygon in polygons {
        end += polygon.len();
        glyph.extend(be16(end - 1));
    }
    glyph.extend(be16(0)); // No instructions.
    glyph.extend(vec![1; points.len()]); // On the curve, and two bytes for each step.
    let steps = |of: fn(&(i16, i16)) -> i16| {
        let all: Vec<i16> = [0].into_iter().chain(points.iter().map(of)).collect();
        all.windows(2).flat_map(|pair| (pair[1] - pair[0]).to_be_bytes()).collect::<Vec<u8>>()
    };
    glyph.extend(steps(|p| p.0));
    glyph.extend(steps(|p| p.1));
    glyph.resize(glyph.len().next_multiple_of(4), 0);
    glyph
}

fn cmap(characters: &[(char, Vec<Polygon>)]) -> Vec<u8> {
    let mut groups: Vec<(u32, usize)> =
        characters.iter().enumerate().map(|(i, (c, _))| (u32::from(*c), i + 1)).collect();
    groups.sort_unstable();
    let header = [be16(0), be16(1), be16(3), be16(10), be32(12), be16(12), be16(0)].concat();
    let mut cmap = [header, be32(16 + 12 * groups.len()), be32(0), be32(groups.len())].concat();
    for (character, glyph) in groups {
        cmap.extend([be32(character as usize), be32(character as usize), be32(glyph)].concat());
    }
    cmap
}

fn head() -> Vec<u8> {
    let start = [be32(0x10000), be32(0), be32(0), be32(0x5f0f_3cf5), be16(0), be16(1000)].concat();
    [start, vec![0; 16 + 8 + 6], be16(1), be16(0)].concat()
}

fn name(family: &str) -> Vec<u8> {
    let text: Vec<u8> = family.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let record = |id| [be16(3), be16(1), be16(0x409), be16(id), be16(text.len()), be16(0)].concat();
    [be16(0), be16(2), be16(6 + 24), record(1), record(4), text.clone()].concat()
}

fn be16(value: usize) -> Vec<u8> {
    (value as u16).to_be_bytes().to_vec()
}

fn be32(value: usize) -> Vec<u8> {
    (value as u32).to_be_bytes().to_vec()
}
